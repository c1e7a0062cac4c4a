"""The record of a trace: round trip, summary by hand, and every inconsistency named.

pytest tests/reset/test_trace_record.py
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from reset import ReSETConfig
from reset.trace import SCHEMA_VERSION, TokenTrace, Trace
from tests.reset.trace_sample import sample_policy, sample_trace


def token(position: int, **changes) -> TokenTrace:
    values = {
        "position": position,
        "token_id": 7,
        "text": "a",
        "entropy_nats": 0.5,
        "step_entropy_nats": 0.5,
        "mean_entropy_nats": 0.5,
        "threshold_nats": 0.65,
        "temperature": 0.1,
        "step": 0,
        "ends_step": False,
    }
    return TokenTrace(**{**values, **changes})


def trace(*tokens: TokenTrace, **changes) -> Trace:
    values = {
        "model": "m",
        "prompt": "p",
        "policy": sample_policy(),
        "seed": 1,
        "tokens": tokens,
        "finish_reason": "stop",
        "seconds": 2.0,
        "versions": {"torch": "2.13.0"},
    }
    return Trace(**{**values, **changes})


FOUR = (
    token(0, entropy_nats=0.25),
    token(1, entropy_nats=1.0, temperature=1.0, text=".\n\n", ends_step=True),
    token(2, entropy_nats=0.5, step=1, probability=0.75, alternatives=(("a", 0.75), ("b", 0.25))),
    token(3, entropy_nats=0.75, step=1, temperature=1.0, text="", threshold_nats=None),
)


@pytest.mark.parametrize(
    "example",
    [
        trace(*FOUR),
        trace(seed=None, seconds=None, finish_reason="length"),
        sample_trace(),
        sample_trace(policy="fixed", t_low=None, tau_0=None),
        sample_trace(policy="uniform", tau_0=None),
    ],
    ids=["four", "empty", "reset", "fixed", "uniform"],
)
def test_json_round_trip_is_exact(example):
    text = example.to_json()
    assert text.isascii()
    assert "\n" not in text
    assert json.loads(text)["schema_version"] == SCHEMA_VERSION
    assert Trace.from_json(text) == example


def test_summary_by_hand():
    assert trace(*FOUR).summary() == {
        "tokens": 4,
        "steps": 2,
        "share_t_high": 0.5,
        "mean_entropy_nats": 0.625,
        "tokens_per_second": 2.0,
    }
    assert trace(*FOUR).step_means_nats() == (0.625, 0.625)


def test_summary_of_an_empty_text_has_no_means():
    assert trace(seconds=None).summary() == {
        "tokens": 0,
        "steps": 0,
        "share_t_high": None,
        "mean_entropy_nats": None,
        "tokens_per_second": None,
    }


def test_a_border_after_the_last_token_begins_no_step():
    assert trace(token(0), token(1, ends_step=True)).summary()["steps"] == 1


def test_fixed_policy_has_no_share_at_t_high():
    fixed = trace(token(0, temperature=0.6), policy=sample_policy(policy="fixed"))
    assert fixed.is_fixed
    assert fixed.summary()["share_t_high"] is None
    assert not fixed.is_at_t_high(fixed.tokens[0])


@pytest.mark.parametrize(
    ("t_low", "t_high", "temperature", "expected"),
    [
        (0.1, 1.0, 0.1, False),
        (0.1, 1.0, 0.10000000149011612, False),  # float32 of 0.1
        (0.3, 0.6, 0.6000000238418579, True),  # float32 of 0.6
        (0.0, 1.0, 0.0, False),
        (0.6, 0.6, 0.6, True),
    ],
)
def test_temperatures_are_told_apart_in_float32(t_low, t_high, temperature, expected):
    one = trace(token(0, temperature=temperature), policy=sample_policy(t_low=t_low, t_high=t_high))
    assert one.is_at_t_high(one.tokens[0]) is expected


def test_policy_is_what_the_config_prints():
    policy = ReSETConfig(t_low=0.1, tau_0=0.5).to_dict()
    built = trace(token(0), policy=policy)
    policy["t_low"] = 0.9
    assert built.policy["t_low"] == 0.1, "the trace holds the caller's own dict"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"position": -1}, ValueError, "position is -1; it must be >= 0"),
        ({"token_id": 7.0}, TypeError, r"token 3: token_id is 7.0 \(float\)"),
        ({"token_id": True}, TypeError, "token 3: token_id is True"),
        ({"text": b"a"}, TypeError, "token 3: text is b'a'"),
        ({"ends_step": 1}, TypeError, "token 3: ends_step is 1"),
        ({"entropy_nats": math.nan}, ValueError, "token 3: entropy_nats is nan.*finite"),
        ({"entropy_nats": -0.1}, ValueError, "token 3: entropy_nats is -0.1"),
        ({"step_entropy_nats": math.inf}, ValueError, "token 3: step_entropy_nats is inf"),
        ({"mean_entropy_nats": "0.5"}, TypeError, "token 3: mean_entropy_nats is '0.5'"),
        ({"threshold_nats": math.inf}, ValueError, "threshold_nats is inf.*pass None"),
        ({"threshold_nats": math.nan}, ValueError, "threshold_nats is nan.*pass None"),
        ({"temperature": -0.1}, ValueError, "token 3: temperature is -0.1"),
        ({"temperature": math.nan}, ValueError, "token 3: temperature is nan"),
        ({"probability": 1.01}, ValueError, "token 3: probability is 1.01.*at most 1"),
        ({"alternatives": (("a", -0.1),)}, ValueError, r"alternatives\[0\] probability is -0.1"),
        ({"alternatives": (("a", 0.5, 1),)}, ValueError, r"alternatives\[0\] has 3 entries"),
        ({"alternatives": ((1, 0.5),)}, TypeError, r"alternatives\[0\] text is 1"),
    ],
)
def test_a_bad_token_is_named(changes, error, message):
    with pytest.raises(error, match=message):
        token(**{"position": 3, **changes})


def test_rounding_of_float32_sums_is_accepted():
    alternatives = [["a", 1.0000001]]
    built = token(0, entropy_nats=-1e-8, probability=1.0000001, alternatives=alternatives)
    assert built.alternatives == (("a", 1.0000001),)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ((token(1),), r"tokens\[0\] has position 1"),
        ((token(0), token(2)), r"tokens\[1\] has position 2.*without gaps"),
        ((token(0, step=1),), "token 0 has step 1, but step 0"),
        ((token(0), token(1, step=1)), "token 1 has step 1, but step 0"),
        ((token(0, ends_step=True), token(1)), "token 1 has step 0, but step 1"),
        ((token(0, ends_step=True), token(1, step=2)), "token 1 has step 2, but step 1"),
        ((token(0, temperature=0.6),), "token 0 has temperature 0.6.*allows 0.1 or 1.0"),
    ],
)
def test_a_bad_order_is_named(tokens, message):
    with pytest.raises(ValueError, match=message):
        trace(*tokens)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"finish_reason": "eos"}, ValueError, "finish_reason is 'eos'; pass 'stop' or 'length'"),
        ({"seconds": 0.0}, ValueError, "seconds is 0"),
        ({"seconds": -1.0}, ValueError, "seconds is -1.0"),
        ({"seed": 1.5}, TypeError, "seed is 1.5"),
        ({"model": None}, TypeError, "model is None"),
        ({"versions": {"torch": 2}}, TypeError, r"versions\['torch'\] is 2"),
        ({"policy": None}, TypeError, "policy is None.*ReSETConfig"),
        ({"policy": {"policy": "reset"}}, ValueError, "policy lacks t_low, tau_0, t_high, window"),
        ({"policy": sample_policy(t_low=None)}, TypeError, r"policy\['t_low'\] is None"),
        ({"policy": sample_policy(tau_0=math.nan)}, ValueError, r"policy\['tau_0'\] is nan"),
        ({"policy": sample_policy(window=3.5)}, TypeError, r"policy\['window'\] is 3.5"),
    ],
)
def test_a_bad_field_is_named(changes, error, message):
    with pytest.raises(error, match=message):
        trace(token(0), **changes)


def test_from_json_names_what_it_cannot_read():
    values = trace(token(0)).to_dict()
    with pytest.raises(ValueError, match="trace is not JSON"):
        Trace.from_json("{")
    with pytest.raises(ValueError, match="trace is a JSON list; an object is needed"):
        Trace.from_json("[]")
    with pytest.raises(ValueError, match=r"schema_version 2; this release reads 1"):
        Trace.from_dict({**values, "schema_version": 2})
    with pytest.raises(ValueError, match=r"lacks \[model\] and has unknown \[name\]"):
        Trace.from_dict({**{k: v for k, v in values.items() if k != "model"}, "name": "m"})
    del values["tokens"][0]["text"]
    with pytest.raises(ValueError, match=r"a token lacks \[text\]"):
        Trace.from_dict(values)


def test_json_never_holds_nan():
    broken = replace(trace(token(0)), policy=sample_policy(extra=math.nan))
    with pytest.raises(ValueError, match="not JSON compliant"):
        broken.to_json()
