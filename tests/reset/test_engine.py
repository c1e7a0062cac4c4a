"""The transformers engine on toy models: prompts, batches, streaming, defaults switched off."""

import pytest
import torch
from transformers import GenerationConfig

from reset import ReSETConfig
from reset.engine import Engine, answer, generate, load_engine, make_prompt
from tests.reset.toy_model import END, save_toy

CONFIG = ReSETConfig(t_low=0.3, tau_0=2.0, window=4)
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def engine(folder) -> Engine:
    return load_engine(str(folder))


def test_text_streams_as_it_is_recorded(engine):
    pieces: list[str] = []
    trace = generate(
        engine,
        [make_prompt(engine, "a")],
        CONFIG,
        max_new_tokens=40,
        seed=1,
        on_text=pieces.append,
    )[0]
    assert len(pieces) > 5
    assert "".join(pieces) == answer(engine, trace)
    assert trace.seed == 1
    assert trace.summary()["tokens_per_second"] > 0


def test_the_same_seed_gives_the_same_text_and_another_seed_another(engine):
    prompts = [make_prompt(engine, "a b c")]
    texts = [
        answer(engine, generate(engine, prompts, CONFIG, max_new_tokens=30, seed=seed)[0])
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_batches_are_padded_left_and_timed_as_a_whole(engine):
    prompts = [make_prompt(engine, text) for text in ("a", "a longer prompt than that")]
    traces = generate(engine, prompts, CONFIG, max_new_tokens=10, seed=0)
    assert [trace.prompt for trace in traces] == ["a", "a longer prompt than that"]
    assert all(trace.seconds is None and 1 <= len(trace.tokens) <= 10 for trace in traces)


def test_a_greedy_batch_gives_each_prompt_its_own_greedy_text(engine):
    """Left padding and neighbours change nothing (float32, greedy by T = 0)."""
    greedy = ReSETConfig(policy="fixed", base_temp=0.0)
    prompts = [make_prompt(engine, text) for text in ("a", "What is 2+2?", "count 1, 2")]
    together = generate(engine, prompts, greedy, max_new_tokens=12, seed=0)
    for prompt, trace in zip(prompts, together, strict=True):
        alone = generate(engine, [prompt], greedy, max_new_tokens=12, seed=9)[0]
        ids = [token.token_id for token in alone.tokens]
        assert ids == [token.token_id for token in trace.tokens]


def test_the_models_own_sampling_defaults_are_off(engine):
    """A repetition penalty would change the raw logits, a temperature would scale them twice."""
    prompts = [make_prompt(engine, "a b c")]
    plain = generate(engine, prompts, CONFIG, max_new_tokens=30, seed=4)[0]
    before = engine.model.generation_config
    engine.model.generation_config = GenerationConfig(
        repetition_penalty=5.0, temperature=0.01, top_k=1, do_sample=True, eos_token_id=7
    )
    try:
        other = generate(engine, prompts, CONFIG, max_new_tokens=30, seed=4)[0]
    finally:
        engine.model.generation_config = before
    shorter = min(len(plain.tokens), len(other.tokens))  # token 7 may end the second
    assert other.tokens[:shorter] == plain.tokens[:shorter]
    assert shorter > 3


def test_finish_reason(engine):
    prompts = [make_prompt(engine, "a")] * 16
    traces = generate(engine, prompts, CONFIG, max_new_tokens=150, seed=5)
    for trace in traces:
        ended = trace.tokens[-1].token_id == engine.tokenizer.eos_token_id
        assert trace.finish_reason == ("stop" if ended else "length")
        assert (END in answer(engine, trace)) is False
        assert ended or len(trace.tokens) == 150
    assert {trace.finish_reason for trace in traces} == {"stop", "length"}


def test_chat_template_and_system_prompt(engine):
    engine.tokenizer.chat_template = TEMPLATE
    try:
        prompt = make_prompt(engine, "hi", system="be brief")
        assert prompt.text == "<system>be brief\n<user>hi\n<assistant>"
        assert make_prompt(engine, "hi", chat=False).text == "hi"
        with pytest.raises(ValueError, match="needs a chat template"):
            make_prompt(engine, "hi", system="x", chat=False)
    finally:
        engine.tokenizer.chat_template = None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": float("nan")}, "top_p is nan"),
    ],
)
def test_bad_arguments(engine, arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(engine, [make_prompt(engine, "a")], CONFIG, **{"max_new_tokens": 3, **arguments})


def test_bad_prompts_and_models(engine, folder, tmp_path):
    with pytest.raises(ValueError, match="prompt is empty"):
        make_prompt(engine, " ")
    with pytest.raises(ValueError, match="no prompts"):
        generate(engine, [], CONFIG, max_new_tokens=3)
    with pytest.raises(ValueError, match="not an NVFP4 checkpoint"):
        load_engine(str(folder), activations="nvfp4")
    with pytest.raises(ValueError, match="missing: no such folder, and no name that a hub model"):
        load_engine(str(tmp_path / "missing"))


def test_e4_a_model_that_yields_nan_is_an_error(engine):
    weight = engine.model.lm_head.weight
    kept = weight[3, 3].item()
    with torch.no_grad():
        weight[3, 3] = float("nan")
    try:
        with pytest.raises(ValueError, match="output position 0 hold NaN"):
            generate(engine, [make_prompt(engine, "a")], CONFIG, max_new_tokens=3, seed=0)
    finally:
        with torch.no_grad():
            weight[3, 3] = kept
