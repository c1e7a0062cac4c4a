"""The trained pocket reasoner in the real vLLM engine on a CPU, BF16 weights and NVFP4.

The BF16 model runs in float32, so that rounding decides no token and its texts can be compared. The
plug-in has no float32: NVFP4 runs in bfloat16.
"""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from reset.evaluate.engines.chat import prompt_ids, prompt_text
from reset.evaluate.problems import Answer
from tests import pocket as held_out
from tests.nvfp4r.vllm.engines import run_engines, with_entry_point

pytestmark = [pytest.mark.vllm, pytest.mark.pocket]


@pytest.fixture(scope="module")
def found(pocket, pocket_nvfp4, tmp_path_factory):
    """What each engine did, and its answers; both engines in one process."""
    tokenizer = AutoTokenizer.from_pretrained(pocket)
    asked = held_out.requests(pocket)
    end, limit = tokenizer.eos_token_id, asked[0].max_tokens
    job = {
        "prompts": [prompt_ids(tokenizer, prompt_text(tokenizer, one, None)) for one in asked],
        "tokens": limit,
        "stop": [end],
        "logprobs": 0,
    }
    options = {"max_model_len": 1024, "max_num_seqs": len(asked)}
    jobs = {
        "bf16": {"model": str(pocket), "options": {**options, "dtype": "float32"}},
        "nvfp4": {"model": str(pocket_nvfp4), "options": options, "enable": 1},
    }
    plugin = with_entry_point(tmp_path_factory.mktemp("plugin"))
    results = run_engines([({name: {**job, **one} for name, one in jobs.items()}, {})], plugin)
    for result in results.values():
        assert "error" not in result, result
        result["answers"] = {}
        for number, call in enumerate(result["calls"]):
            ids = call["tokens"]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            reason = "stop" if ids[-1] == end else "length"
            result["answers"][number] = Answer(text, reason, len(ids))
    return results


@pytest.mark.parametrize(("form", "cost"), [("bf16", 0.0), ("nvfp4", held_out.COST)])
def test_it_solves_what_it_solved_after_its_training(pocket, found, form, cost):
    counts = held_out.right(pocket, found[form]["answers"])
    for family, floor in held_out.floors(pocket, cost).items():
        assert counts[family] >= floor, counts


def test_the_batched_decoder_gives_the_same_answers(pocket, found):
    same = held_out.batched(pocket, pocket)
    assert {number: found["bf16"]["answers"][number] for number in same} == same


def test_nvfp4_layers_are_those_of_the_plug_in(found):
    groups = found["nvfp4"]["status"]["groups"]
    names = {name.split()[0].rpartition(".")[2] for group in groups for name in group["layers"]}
    assert names == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert found["bf16"]["status"]["groups"] == []
