"""Both runners where memory is tight: chunked prefill, preemption, async scheduling, drafts."""

from __future__ import annotations

import json

import pytest

from tests.reset.toy_model import toy_tokenizer
from tests.reset.vllm.engines import (
    RESET,
    RUNNERS,
    V2_HAS_DRAFTS,
    check_against_specification,
    run_engines,
)

pytestmark = pytest.mark.vllm

# 224 tokens of key-value cache for three requests of up to 124, prompts in chunks of 64.
TIGHT = {
    "block_size": 32,
    "num_gpu_blocks_override": 8,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "max_model_len": 128,
}


def long_batch(has_switch: bool) -> list[dict]:
    """Prompts of more than one chunk each; unseeded, as V1 on a CPU needs with chunks."""
    switch = {"extra_args": RESET} if has_switch else {}
    return [
        {
            "prompt": [(7 * index + n) % 200 for n in range(70 + 9 * index)],
            "params": {
                "max_tokens": 36,
                "ignore_eos": True,
                "temperature": 0.8,
                **switch,
            },
        }
        for index in range(3)
    ]


ALLOWED = toy_tokenizer().convert_tokens_to_ids(["a", "b", "Ċ", ".ĊĊ"])
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
SPECULATION = {"speculative_config": {**NGRAM, "prompt_lookup_min": 1, "prompt_lookup_max": 3}}
OFTEN_UNSURE = {**RESET, "tau_0": 0.3}
MODES = [(runner, is_async) for runner in RUNNERS for is_async in (False, True)]
DEFAULTS = {key: value for key, value in RESET.items() if key != "reset"}
# Where requests say nothing, the server does: by its options, or by its environment.
SERVER: dict = {
    ("v1", True): {"options": {**TIGHT, "additional_config": {"reset": DEFAULTS}}},
    ("v2", True): {"environment": {"RESET_DEFAULTS": json.dumps(DEFAULTS)}},
}


@pytest.fixture(scope="module")
def answers(toy_folder) -> dict:
    """Of every engine: tight ones by runner and async scheduling, and two with drafts."""
    job = {"has_reset": True, "model": str(toy_folder)}
    jobs: dict = {}
    for mode in MODES:
        runner, is_async = mode
        call = long_batch(has_switch=mode not in SERVER)
        jobs[mode] = {**job, "runner": runner, "is_async": is_async, "calls": [call]}
        jobs[mode] |= {"options": TIGHT, **SERVER.get(mode, {})}
    params = {"max_tokens": 40, "ignore_eos": True, "allowed_token_ids": ALLOWED}
    params |= {"temperature": 0.8, "extra_args": OFTEN_UNSURE}
    call = [{"prompt": ALLOWED * 8, "params": params}, {"prompt": ALLOWED, "params": params}]
    if V2_HAS_DRAFTS:
        jobs["v2 drafts"] = {**job, "runner": "v2", "options": SPECULATION, "calls": [call]}
    jobs["v1 drafts"] = {**job, "runner": "v1", "options": SPECULATION, "calls": []}
    return run_engines(jobs)


@pytest.mark.parametrize("mode", MODES)
def test_l1_l2_l3_chunks_and_preemptions_leave_every_history_whole(answers, mode):
    answer = answers[mode]
    assert "error" not in answer, answer
    used = set()
    for result in answer["calls"][0]["results"]:
        used |= set(check_against_specification(result, RESET))
    assert len(used) == 2
    assert answer["came_back"]  # requests were preempted
    assert answer["lost"] == 0


def test_l6_drafts_of_speculation_are_rolled_and_committed_as_accepted(answers):
    """N-gram drafts over four possible tokens, two of them newlines: about half are accepted."""
    if not V2_HAS_DRAFTS:
        pytest.skip("the V2 runner has no n-gram drafts before vLLM 0.32")
    answer = answers["v2 drafts"]
    assert "error" not in answer, answer
    used = set()
    for result in answer["calls"][0]["results"]:
        used |= set(check_against_specification(result, OFTEN_UNSURE))
    assert len(used) == 2
    assert max(len(positions) for positions in answer["rows"]) == 6  # two requests, three rows each
    assert len(answer["rows"]) < 35  # fewer steps than tokens of one: drafts were accepted
    assert answer["lost"] == 0


def test_l6_v1_refuses_speculation_in_one_sentence(answers):
    assert "speculative decoding" in answers["v1 drafts"]["error"]
