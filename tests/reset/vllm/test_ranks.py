"""Two CPU processes that share a model decide alike, bit for bit, or their tokens would part."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import need_two_cpus
from tests.reset.vllm.ranks import RankChecks

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="vLLM takes GPUs here; test_gpu_tensor_parallel has these"
    ),
]


class TestOnTwoCPUs(RankChecks):
    @pytest.fixture(scope="class", autouse=True)
    def cpus(self) -> None:
        need_two_cpus()
