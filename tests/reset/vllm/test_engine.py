"""Both runners of the real engine: what ReSET does to requests, and what it leaves alone."""

from __future__ import annotations

import math

import pytest

from tests.reset.vllm.engines import (
    RESET,
    RUNNERS,
    VOCABULARY,
    check_against_specification,
    run_engines,
)

pytestmark = pytest.mark.vllm

PROMPTS = [[5, 6, 7], [20, 21], [40, 41, 42, 43]]
LONG = list(range(100, 180))  # two blocks of key-value cache and a rest
TOKENS = 10


def batch(count: int = 3, extra: dict | None = None, **params) -> list[dict]:
    """Requests with one seed each; `extra` are their extra_args."""
    requests = []
    for index, prompt in enumerate(PROMPTS[:count]):
        values = {"max_tokens": TOKENS, "ignore_eos": True, "seed": index, **params}
        if values["seed"] is None or values.get("temperature") == 0:
            del values["seed"]
        if extra is not None:
            values["extra_args"] = extra
        requests.append({"prompt": prompt, "params": values})
    return requests


STOCK = {
    "sampled": batch(),
    "greedy": batch(temperature=0),
    "at half": batch(temperature=0.5),
}
OPTIONS = {"max_logprobs": VOCABULARY, "enable_prefix_caching": True, "block_size": 32}
FIXED = {"reset": 1, "policy": "fixed", "base_temp": 0.5}
OURS = {
    "off": batch(),
    "switched off": batch(extra={"reset": 0, "t_low": 0.3, "tau_0": 0.6}),
    "greedy": batch(temperature=0, extra=RESET),
    "fixed at half": batch(temperature=0.7, extra=FIXED),
    "on": batch(temperature=0.7, extra=RESET, logprobs=VOCABULARY),
    "on, four": batch(1, temperature=0.7, extra=RESET, n=4, seed=None),
    "choice": batch(extra=RESET, logprobs=VOCABULARY, choice=["yes", "no"]),
    "argmax": batch(extra={**RESET, "t_low": 0, "t_high": 0}),
    "tiny": batch(extra={**RESET, "t_low": 1e-5, "t_high": 1e-5}),
    "long": [{**batch(1, extra=RESET)[0], "prompt": LONG}],
    "long again": [{**batch(1, extra=RESET)[0], "prompt": LONG}],
    "misspelt": batch(1, extra={"reset": 1, "t_low": 0.3, "tau0": 0.6}),
    "after it": batch(),
    "mixed": [*batch(1), *batch(2, extra=RESET)[1:]],
}


@pytest.fixture(scope="module", params=RUNNERS)
def runner(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def both(runner, toy_folder) -> dict[str, dict]:
    job = {"runner": runner, "model": str(toy_folder)}
    stock = {**job, "has_reset": False, "calls": list(STOCK.values())}
    ours = {**job, "has_reset": True, "calls": list(OURS.values())}
    answers = run_engines({"stock": stock, "ours": {**ours, "options": OPTIONS}})
    assert not [answer for answer in answers.values() if "error" in answer]
    return answers


@pytest.fixture(scope="module")
def stock(both) -> dict[str, list[dict]]:
    return dict(zip(STOCK, both["stock"]["calls"], strict=True))


@pytest.fixture(scope="module")
def ours(both) -> dict[str, list[dict]]:
    calls = dict(zip(OURS, both["ours"]["calls"], strict=True))
    return {**calls, "log": both["ours"]["log"]}


def tokens(call: dict) -> list[list[int]]:
    return [result["tokens"][0] for result in call["results"]]


@pytest.mark.parametrize("call", ["off", "switched off", "after it"])
def test_a_request_that_does_not_switch_it_on_gets_the_tokens_of_stock_vllm(ours, stock, call):
    assert tokens(ours[call]) == tokens(stock["sampled"])
    assert not any(result["records"] for result in ours[call]["results"])


def test_requests_beside_one_that_is_on_are_left_alone(ours, stock):
    assert tokens(ours["mixed"])[0] == tokens(stock["sampled"])[0]
    assert ours["mixed"]["results"][1]["records"]


def test_a_greedy_request_is_left_alone(ours, stock):
    assert tokens(ours["greedy"]) == tokens(stock["greedy"])
    assert not any(result["records"] for result in ours["greedy"]["results"])


def test_l9_the_requests_own_temperature_is_cancelled(ours, stock):
    """0.5 by ReSET at temperature 0.7 samples what plain 0.5 samples; the log says it once."""
    assert tokens(ours["fixed at half"]) == tokens(stock["at half"])
    assert tokens(ours["fixed at half"]) != tokens(stock["sampled"])
    assert sum("own temperature (here 0.7) is cancelled" in line for line in ours["log"]) == 1


def test_l5_every_token_follows_the_specification_from_raw_logits(ours):
    """Entropies are those of the raw logprobs that vLLM itself reports."""
    used = set()
    for result in ours["on"]["results"]:
        used |= set(check_against_specification(result, RESET))
    assert len(used) == 2


def test_four_answers_of_one_prompt_have_four_histories(ours):
    result = ours["on, four"]["results"][0]
    assert len({tuple(answer) for answer in result["tokens"]}) > 1


def test_e1_structured_output_masks_logits_and_entropy_stays_finite(ours):
    forced = 0
    for result in ours["choice"]["results"]:
        check_against_specification(result, RESET)
        entropies = [fields[2] for fields in result["records"].values()]
        assert all(math.isfinite(entropy) and entropy >= 0 for entropy in entropies)
        forced += sum(entropy == 0 for entropy in entropies)
    assert forced > 0  # one candidate is left: no entropy, and no NaN


def test_a_prompt_from_the_prefix_cache_changes_nothing(ours):
    (first,), (second,) = ours["long"]["results"], ours["long again"]["results"]
    assert (first["cached"], second["cached"]) == (0, 64)
    assert check_against_specification(first, RESET) == check_against_specification(second, RESET)
    assert first["tokens"] == second["tokens"]


@pytest.mark.parametrize("call", ["argmax", "tiny"])
def test_e3_e6_temperature_zero_is_argmax(ours, stock, call):
    assert tokens(ours[call]) == tokens(stock["greedy"])


def test_l7_a_misspelt_key_is_refused_by_name_and_the_engine_lives_on(ours):
    assert "unknown key 'tau0'; did you mean 'tau_0'?" in ours["misspelt"]["refused"]


def test_the_log_tells_what_each_request_got(ours):
    left = [line for line in ours["log"] if line.startswith("reset: request left")]
    assert any(line.startswith(f"reset: request left, {TOKENS} tokens, ") for line in left)
    assert all("history whole" in line for line in left)
