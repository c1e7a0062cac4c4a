"""Two GPUs that share a model: real engines with --tensor-parallel-size 2, against one GPU.

make test-gpu          (needs vLLM, and two GPUs; skipped elsewhere)
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from tests.nvfp4r.vllm.engines import run_engines, with_entry_point
from tests.nvfp4r.vllm.models import PROMPTS, make_model, quantised, save, save_twin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

EXTENSION = "nvfp4r.vllm.worker.StatusExtension"
UNEQUAL = {"k_proj": 1, "v_proj": 3, "up_proj": 2}  # powers of two


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """A model with biases, unequal scales in fused layers and a quantised head, and its twin."""
    folder = tmp_path_factory.mktemp("ranks")
    model = make_model("qwen2")
    tensors = quantised(
        model, head=True, extra=lambda name: UNEQUAL.get(name.rpartition(".")[2], 0)
    )
    save_twin(folder / "twin", model, tensors)
    save(folder / "nvfp4", model, tensors, "modelopt")

    def job(name: str, ranks: int, **others):
        options = {
            "tensor_parallel_size": ranks,
            "disable_custom_all_reduce": True,
            "gpu_memory_utilization": 0.2,  # four engines share two GPUs
        }
        if ranks > 1:
            options["worker_extension_cls"] = EXTENSION
        return {"model": str(folder / name), "prompts": PROMPTS, "options": options, **others}

    workers = {
        "NVFP4R": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    groups = [  # all at once: an engine takes most of a minute to start
        ({"twin": job("twin", 1)}, {}),
        ({"nvfp4": job("nvfp4", 1, enable=1)}, {}),
        ({"twin on two": job("twin", 2)}, workers),
        ({"nvfp4 on two": job("nvfp4", 2, rpc="nvfp4r_status", again=True)}, workers),
    ]
    found = run_engines(groups, with_entry_point(folder / "plugin"), at_once=len(groups))
    for name, answer in found.items():
        assert "error" not in answer, (name, answer)
    return found


def logprobs(answers: dict, name: str) -> Tensor:
    """Of the first token of each prompt: later ones may follow another choice."""
    return torch.tensor([call["logprobs"][0] for call in answers[name]["calls"]])


def distance(answers: dict, one: str, other: str) -> float:
    return (logprobs(answers, one) - logprobs(answers, other)).abs().max().item()


def test_both_ranks_run_on_the_kernels(answers):
    ranks = answers["nvfp4 on two"]["rpc"]
    assert len(ranks) == 2
    for status in ranks:
        sizes = {
            name.split(" x ")[0].rpartition(".")[2]: (group["N"], group["K"])
            for group in status["groups"]
            for name in group["layers"]
        }
        # 128 hidden, 160 between, 2 heads of 64: halves along N, or along K of o and down.
        assert sizes["qkv_proj"] == (192, 128)
        assert sizes["o_proj"] == (128, 64)
        assert sizes["gate_up_proj"] == (160, 128)
        assert sizes["down_proj"] == (128, 80)
        assert {group["unequal_scales"] for group in status["groups"]} == {0, 2}


def test_two_ranks_differ_from_one_no_more_than_vllm_itself(answers):
    """Sharing K rounds partial sums to bfloat16, which moves the twin as well.

    The twin holds the same matrices, so what separates it from us on the same ranks are the
    roundings of other sums in float32, far below those of bfloat16.
    """
    noise = distance(answers, "twin", "twin on two")
    assert noise > 0
    assert distance(answers, "nvfp4", "twin") <= 2 * noise
    assert distance(answers, "nvfp4 on two", "twin on two") <= 2 * noise


def test_two_ranks_give_the_same_bits_again(answers):
    assert answers["nvfp4 on two"]["again"] == answers["nvfp4 on two"]["calls"]
