"""The plug-in on two ranks that share a model: jobs, and what has to hold on CPUs and GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nvfp4r.vllm.engines import run_engines, with_entry_point
from tests.nvfp4r.vllm.models import PROMPTS, make_model, quantised, save, save_twin
from tests.ranks import rank_environment

EXTENSION = "nvfp4r.vllm.worker.StatusExtension"
UNEQUAL = {"k_proj": 1, "v_proj": 3, "up_proj": 2}  # powers of two
ENVIRONMENT = {"NVFP4R": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
SERVED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # frontend, engine and ranks, as in a server
# Of one rank: 128 hidden, 160 between, 2 heads of 64; halves along N, or along K of o and down. Of
# the head half of 140 rows, which vLLM pads to 192.
SHARDS = {
    "qkv_proj": (192, 128),
    "o_proj": (128, 64),
    "gate_up_proj": (160, 128),
    "down_proj": (128, 80),
    "lm_head": (96, 128),
}

Answers = dict[str, dict[str, Any]]


def make_jobs(folder: Path, options: dict[str, Any]) -> tuple[Answers, Answers]:
    """A model with biases, unequal scales in fused layers and a quantised head, and its twin.

    Args:
        options: for every engine.

    Returns:
        The jobs of engines with one rank and of those with two.
    """
    model = make_model("qwen2")
    tensors = quantised(
        model, head=True, extra=lambda name: UNEQUAL.get(name.rpartition(".")[2], 0)
    )
    save_twin(folder / "twin", model, tensors)
    save(folder / "nvfp4", model, tensors, "modelopt")

    def job(name: str, ranks: int, **others: Any) -> dict[str, Any]:
        split = {"tensor_parallel_size": ranks, "disable_custom_all_reduce": True}
        if ranks > 1:
            split["worker_extension_cls"] = EXTENSION
        return {
            "model": str(folder / name),
            "prompts": PROMPTS,
            "options": {**options, **split},
            **others,
        }

    one = {"twin": job("twin", 1), "nvfp4": job("nvfp4", 1, enable=1)}
    two = {
        "nvfp4 on two": job("nvfp4", 2, rpc="nvfp4r_status", again=True, environment=SERVED),
        "twin on two": job("twin", 2),
    }
    return one, two


def answer(
    groups: list[tuple[Answers, dict[str, str]]], folder: Path, at_once: int
) -> dict[str, dict[str, Any]]:
    """What the engines answered; none may have refused."""
    ready = [(jobs, {**rank_environment(), **more}) for jobs, more in groups]
    found = run_engines(ready, with_entry_point(folder / "plugin"), at_once)
    for name, one in found.items():
        assert "error" not in one, (name, one)
    return found


def logprobs(answers: Answers, name: str) -> Tensor:
    """Of the first token of each prompt: later ones may follow another choice."""
    return torch.tensor([call["logprobs"][0] for call in answers[name]["calls"]])


def distance(answers: Answers, one: str, other: str) -> float:
    return (logprobs(answers, one) - logprobs(answers, other)).abs().max().item()


class RankChecks:
    """Tests for a subclass that has a fixture `answers`, and says on what it runs."""

    @pytest.mark.parametrize("rank", range(2))
    def test_every_rank_packs_its_shard_and_tells_what_it_does(self, answers, rank):
        status = answers["nvfp4 on two"]["rpc"][rank]
        sizes = {
            name.split(" x ")[0].rpartition(".")[2]: (group["N"], group["K"])
            for group in status["groups"]
            for name in group["layers"]
        }
        assert sizes == SHARDS, sizes
        assert {group["unequal_scales"] for group in status["groups"]} == {0, 2}

    def test_the_frontend_holds_no_layer(self, answers):
        assert len(answers["nvfp4 on two"]["rpc"]) == 2
        assert answers["nvfp4 on two"]["status"]["groups"] == []

    def test_two_ranks_give_the_same_bits_again(self, answers):
        assert answers["nvfp4 on two"]["again"] == answers["nvfp4 on two"]["calls"]
