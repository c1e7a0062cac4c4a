"""The transformers engine on a toy model: seeds, company, thinking, limits."""

from __future__ import annotations

import json

import pytest

from reset.config import ReSETConfig
from reset.evaluate.engines import Request
from reset.evaluate.engines.hf import TransformersEngine
from tests.reset.toy_model import save_toy

POLICY = ReSETConfig(t_low=0.3, tau_0=2.0)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if enable_thinking %}think{% else %}go{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def engine(folder):
    return TransformersEngine(str(folder))


def request(text="a b", seed=1, config=POLICY, **changes):
    return Request((("user", text),), seed, config, **{"max_tokens": 20, **changes})


def test_an_answer_depends_on_its_request_alone(engine):
    requests = [request(text, seed) for text in ("a", "b c") for seed in (1, 2)]
    together = dict(engine.generate(requests))
    backwards = dict(engine.generate(requests[::-1]))
    assert together == {3 - position: answer for position, answer in backwards.items()}
    assert len({answer.text for answer in together.values()}) == 4


def test_the_answer_is_that_of_the_generate_command(engine, folder):
    from reset.engine import answer, generate, load_engine, make_prompt

    loaded = load_engine(str(folder))
    (trace,) = generate(loaded, [make_prompt(loaded, "a b")], POLICY, max_new_tokens=20, seed=1)
    ((_, found),) = engine.generate([request()])
    assert found.text == answer(loaded, trace)
    assert (found.finish_reason, found.tokens) == (trace.finish_reason, len(trace.tokens))


def test_min_p_takes_away_unlikely_tokens(engine):
    """With min_p near 1 the likeliest token is the only one left, whatever the seed."""
    config = ReSETConfig(policy="fixed", base_temp=1.0)
    narrow = engine.generate([request(seed=s, config=config, min_p=0.999) for s in range(3)])
    assert len({answer.text for _, answer in narrow}) == 1
    wide = engine.generate([request(seed=s, config=config) for s in range(3)])
    assert len({answer.text for _, answer in wide}) == 3


def test_the_limit_is_told(engine):
    ((_, answer),) = engine.generate([request(max_tokens=2)])
    assert answer.tokens <= 2
    assert answer.finish_reason == ("length" if answer.tokens == 2 else "stop")


def test_it_says_what_decides_the_answers(engine):
    about = engine.describe()
    assert len(about["model_sha256"]) == 64
    assert about["versions"]["torch"]
    assert about["chat_template_sha256"] is None
    assert json.dumps(about)


def test_the_thinking_switch_reaches_the_template(folder, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tokenizer.save_pretrained(tmp_path)
    asked = Request((("system", "s"), ("user", "q")), 1, POLICY, 5)
    prompts = [
        TransformersEngine(str(tmp_path), thinking=thinking).render(asked)
        for thinking in (True, False)
    ]
    assert prompts == ["[system] s\n[user] q\nthink", "[system] s\n[user] q\ngo"]


def test_a_switch_that_nothing_listens_to_is_refused(folder):
    with pytest.raises(ValueError, match="chat template has no enable_thinking switch"):
        TransformersEngine(str(folder), thinking=True)


def test_a_system_prompt_needs_a_template(engine):
    with pytest.raises(ValueError, match="no chat template"):
        engine.render(Request((("system", "s"), ("user", "q")), 1, POLICY, 5))


def test_nvfp4r_needs_an_nvfp4_checkpoint(folder):
    with pytest.raises(ValueError, match="not an NVFP4 checkpoint, so --backend nvfp4r"):
        TransformersEngine(str(folder), needs_nvfp4=True)
