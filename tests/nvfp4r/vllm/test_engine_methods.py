"""What every method of reset-quantize writes is a checkpoint that real vLLM engines load on a CPU.

Tokens are those of nvfp4r.hf. The engine rounds each sum once, nvfp4r.hf each weight, too; so they
are compared where the best one leads by a factor of e, as in test_engine_rotated.py.
"""

from __future__ import annotations

import pytest
import torch

from nvfp4r.convert import convert, weight_maxima
from nvfp4r.hf import load_model
from nvfp4r.hf.awq import awq_tensors
from nvfp4r.hf.sequential import gptq_tensors, work_folder
from nvfp4r.methods import METHODS
from nvfp4r.selection import plan_conversion
from tests.nvfp4r.vllm.engines import run_engines, with_entry_point
from tests.nvfp4r.vllm.models import VOCABULARY, make_model

pytestmark = pytest.mark.vllm

PROMPTS = [[3 + 7 * i, *range(i, 5 * i, 3), 100 - i] for i in range(10)]
TOKENS = 2
LEAD = 1.0  # nats; the two differ by up to 0.2 near the best token
CPU = torch.device("cpu")
ORDINARY = ("four-over-six", "gptq", "awq")  # "rtn" and "brq" have files of their own


def write(source, folder, method: str) -> None:
    """The checkpoint of one method, as the command would write it."""
    plan = plan_conversion(source)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in (90, 60, 120)]
    maxima, stored = weight_maxima(plan, method=method), None
    if method == "awq":
        stored, _ = awq_tensors(plan, rows)
    elif METHODS[method].calibrated:
        work = work_folder(folder, plan, rows, CPU, method=method)
        stored, _ = gptq_tensors(plan, rows, CPU, method=method, maxima=maxima, work=work)
    dialect = "modelopt" if METHODS[method].rotation is None else "compressed-tensors"
    convert(plan, folder, maxima, method=method, stored=stored, dialect=dialect)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("methods")
    make_model().save_pretrained(folder / "source")
    for method in (*ORDINARY, "mr-gptq"):
        write(folder / "source", folder / method, method)
    return folder


@pytest.fixture(scope="module")
def answers(folder):
    jobs = {
        method: {
            "model": str(folder / method),
            "prompts": PROMPTS,
            "tokens": TOKENS,
            "logprobs": 2,
            "enable": 1,
        }
        for method in (*ORDINARY, "mr-gptq")
    }
    found = run_engines([(jobs, {})], with_entry_point(folder / "plugin"))
    for answer in found.values():
        assert "error" not in answer, answer
    return found


@pytest.mark.parametrize("method", [*ORDINARY, "mr-gptq"])
def test_the_tokens_are_those_of_nvfp4r_hf(answers, folder, method):
    model = load_model(folder / method)
    options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None}
    compared = 0
    for prompt, call in zip(PROMPTS, answers[method]["calls"], strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)  # or generate would take every id of padding for padding
        found = model.generate(ids, attention_mask=mask, **options)
        expected = found[0, len(prompt) :].tolist()
        assert len(call["tokens"]) == TOKENS
        for token, right, row in zip(call["tokens"], expected, call["logprobs"], strict=True):
            best, second = sorted(row)[-1:-3:-1]
            if best - second < LEAD:  # from here on rounding may decide
                break
            assert token == right, best - second
            compared += 1
    assert compared >= 5


@pytest.mark.parametrize("method", [*ORDINARY, "mr-gptq"])
def test_d4_all_layers_run_on_this_projects_kernels(answers, method):
    status = answers[method]["status"]
    assert status["declined"] == {}
    assert {group["rotation"] for group in status["groups"]} == {METHODS[method].rotation}
    assert len(status["groups"]) == 4
