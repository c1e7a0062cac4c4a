"""The batched decoder against the engine of `reset`, and against the policy's own text."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from lab.pocket_reasoner.decode import BatchEngine, _Batch
from lab.pocket_reasoner.problems import make_problems
from lab.pocket_reasoner.sampling import draw, uniform
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer

from reset import StepDetector, entropy_nats
from reset.config import ReSETConfig
from reset.engine import generate, load_engine, make_prompt
from reset.evaluate.engines import Request
from reset.evaluate.engines.chat import prompt_ids
from tests.reset.spec import Request as Spec

LIMIT = 48
QUESTIONS = [problem.question for problem in make_problems("search", "calibration", 7)]
POLICIES = {
    "fixed": ReSETConfig(policy="fixed", base_temp=0.7),
    "greedy": ReSETConfig(policy="fixed", base_temp=0.0),
    **{
        name: ReSETConfig(t_low=0.2, t_high=1.3, tau_0=2.4, window=4, policy=name)
        for name in ("reset", "threshold", "sliding", "relative", "uniform")
    },
    "greedy below": ReSETConfig(t_low=0.0, t_high=1.0, tau_0=2.4, window=4),
}


def requests(config, limit=LIMIT, top_p=0.9):
    return [
        Request((("user", question),), 100 + number, config, limit, top_p)
        for number, question in enumerate(QUESTIONS)
    ]


@pytest.fixture(scope="module")
def engine(toy_folder):
    return BatchEngine.load(toy_folder, rows=3)


def test_greedy_texts_equal_those_of_the_engine(engine, toy_folder):
    plain = load_engine(str(toy_folder), dtype="float32")
    found = dict(engine.decode(requests(POLICIES["greedy"])))
    assert len(found) == len(QUESTIONS)
    for number, question in enumerate(QUESTIONS):
        (trace,) = generate(
            plain,
            [make_prompt(plain, question)],
            POLICIES["greedy"],
            max_new_tokens=LIMIT,
            alternatives=0,
        )
        assert found[number].ids == tuple(token.token_id for token in trace.tokens)
        assert found[number].ended == (trace.finish_reason == "stop")
        torch.testing.assert_close(
            torch.tensor(found[number].entropy_nats),
            torch.tensor([token.entropy_nats for token in trace.tokens]),
            atol=1e-5,
            rtol=1e-5,
        )


@torch.no_grad()
@pytest.mark.parametrize("name", POLICIES)
def test_every_token_is_what_the_written_policy_draws(engine, toy_model, toy_folder, name):
    """Replays answers from transformers' logits, the scalar policy and the rows' own numbers."""
    config = POLICIES[name]
    tokenizer = AutoTokenizer.from_pretrained(toy_folder)
    detector = StepDetector.from_tokenizer(tokenizer)
    asked = requests(config)
    temperatures, steps = set(), 0
    for number, decoded in engine.decode(asked):
        prompt = tokenizer(engine.render(asked[number]), add_special_tokens=False)["input_ids"]
        logits = toy_model(torch.tensor([[*prompt, *decoded.ids]])).logits[0, len(prompt) - 1 : -1]
        policy, state, ends_step = Spec(**config.to_dict()), detector.initial_state(1), False
        for place, token in enumerate(decoded.ids):
            seen = decoded.entropy_nats[place]
            assert seen == pytest.approx(float(entropy_nats(logits[place])), abs=2e-5)
            temperature = policy.feed(seen, bool(ends_step)).temperature
            temperatures.add(temperature)
            if temperature <= 1e-6:
                expected = int(logits[place].argmax())
            else:
                chance = uniform(torch.tensor([asked[number].seed]), torch.tensor([place]))
                scaled = logits[place : place + 1] / temperature
                expected = int(draw(scaled, torch.tensor([0.9]), chance))
            assert token == expected
            state, ends_step = detector.advance(state, torch.tensor([token]))
            steps += bool(ends_step)
    assert steps > 5
    assert len(temperatures) == (1 if config.policy == "fixed" else 2)


def test_an_answer_does_not_depend_on_its_company(engine):
    mixed = [
        request
        for name, config in POLICIES.items()
        for request in requests(config, limit=4 + 2 * len(name))[:3]
    ]
    together = dict(engine.decode(mixed))
    chosen = [2, 7, 16, 23]
    for number in chosen:
        assert dict(engine.decode([mixed[number]])) == {0: together[number]}
    backwards = dict(engine.decode(mixed[::-1]))
    assert {len(mixed) - 1 - place: one for place, one in backwards.items()} == together


def test_seeds_matter_and_limits_hold(engine):
    config = POLICIES["fixed"]
    one, two = (
        dict(engine.decode([dataclasses.replace(one, seed=seed) for one in requests(config)]))
        for seed in (1, 2)
    )
    assert one != two
    for decoded in one.values():
        end = engine.tokenizer.eos_token_id
        assert decoded.ended == (decoded.ids[-1] == end)
        assert end not in decoded.ids[:-1]
        assert len(decoded.ids) == LIMIT or decoded.ended


def test_answers_are_those_of_an_evaluation_engine(engine):
    config = POLICIES["fixed"]
    answers = dict(engine.generate(requests(config, limit=5)))
    decoded = dict(engine.decode(requests(config, limit=5)))
    for number, answer in answers.items():
        assert answer.tokens == len(decoded[number].ids) <= 5
        assert answer.finish_reason == ("stop" if decoded[number].ended else "length")
        assert "<|end|>" not in answer.text
    assert list(engine.generate([])) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 1024}, "request 0: .* exceed the 1024 positions"),
        ({"min_p": 0.1}, "request 0: min_p is 0.1"),
    ],
)
def test_refused_requests(engine, changes, message):
    request = dataclasses.replace(requests(POLICIES["greedy"])[0], **changes)
    with pytest.raises(ValueError, match=message):
        list(engine.decode([request]))


def test_refused_models(toy_model, toy_folder):
    tokenizer = AutoTokenizer.from_pretrained(toy_folder)
    with pytest.raises(ValueError, match="rows is 0"):
        BatchEngine(toy_model, tokenizer, rows=0)


def test_bad_logits_are_an_error_and_never_a_token(toy_folder):
    engine = BatchEngine.load(toy_folder, rows=2)
    with torch.no_grad():
        engine.model.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match="logits hold NaN or"):
        list(engine.decode(requests(POLICIES["fixed"])))


def test_prompts_are_made_once_however_many_samples(toy_folder, monkeypatch):
    engine = BatchEngine.load(toy_folder, rows=4)
    rendered = []
    plain = engine.render
    monkeypatch.setattr(engine, "render", lambda one: rendered.append(one) or plain(one))
    asked = [
        dataclasses.replace(one, seed=seed)
        for one in requests(POLICIES["fixed"], limit=3)
        for seed in range(3)
    ]
    assert len(dict(engine.decode(asked))) == 3 * len(QUESTIONS)
    assert len(rendered) == len(QUESTIONS)


class _NoWaiting(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: reading values back, sizes that depend on them, and
    tensors made of Python numbers."""

    refused = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "lift_fresh")

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.seen.add(name)
        assert name.split(".")[0] not in self.refused, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def new_batch(engine, asked):
    prompts = [prompt_ids(engine.tokenizer, engine.render(one)) for one in asked]
    batch = _Batch(
        engine.model, engine._detector, engine._end, asked, prompts, rows=len(asked), graphs=False
    )
    batch.admit({row: row for row in range(len(asked))})
    return batch


@torch.no_grad()
def test_idle_rows_rest_at_their_first_cell(engine):
    short, long = requests(POLICIES["fixed"])[:2]
    batch = new_batch(engine, [dataclasses.replace(short, max_tokens=1), long])
    longest = batch._prompt.shape[1]
    for _ in range(longest + 3):
        batch._step()
    assert batch._active.tolist() == [False, True]
    assert batch._position.tolist()[0] == 0
    assert batch._position.tolist()[1] == longest + 3


def test_a_step_waits_for_nothing_and_moves_no_state(engine):
    with torch.no_grad():
        batch = new_batch(engine, requests(POLICIES["reset"])[:3])
        tensors = {
            name: value.data_ptr() for name, value in vars(batch).items() if torch.is_tensor(value)
        }
        with _NoWaiting() as mode:
            for _ in range(30):
                batch._step()
    assert "sort" in mode.seen
    assert len(tensors) > 12
    assert tensors == {name: getattr(batch, name).data_ptr() for name in tensors}
    assert int(batch._count.min()) > 0
