"""Two CPU processes that share a model: real engines with --tensor-parallel-size 2, against one."""

from __future__ import annotations

import pytest
import torch

from tests.nvfp4r.vllm.ranks import ENVIRONMENT, RankChecks, answer, distance, make_jobs
from tests.ranks import need_two_cpus

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="vLLM takes GPUs here; test_gpu_tensor_parallel has these"
    ),
]


class TestOnTwoCPUs(RankChecks):
    @pytest.fixture(scope="class")
    def answers(self, tmp_path_factory):
        need_two_cpus()
        folder = tmp_path_factory.mktemp("ranks")
        one, two = make_jobs(folder, {})
        return answer([({**two, **one}, ENVIRONMENT)], folder, at_once=1)

    @pytest.mark.parametrize("ranks", ["", " on two"])
    def test_the_checkpoint_is_its_twin_bit_for_bit(self, answers, ranks):
        """On a CPU both multiply the same matrices in the same order, rank by rank."""
        assert answers[f"nvfp4{ranks}"]["calls"] == answers[f"twin{ranks}"]["calls"]

    def test_two_ranks_choose_as_one_does(self, answers):
        """Half sums are added in another order, which is seen, but moves no choice here."""
        assert distance(answers, "nvfp4 on two", "nvfp4") > 0
        tokens = [
            [call["tokens"] for call in answers[name]["calls"]] for name in ("nvfp4 on two", "twin")
        ]
        assert tokens[0] == tokens[1]
