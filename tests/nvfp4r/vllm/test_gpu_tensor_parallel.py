"""Two GPUs that share a model: real engines with --tensor-parallel-size 2, against one GPU.

make test-gpu          (needs vLLM, and two GPUs; skipped elsewhere)
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.nvfp4r.vllm.ranks import ENVIRONMENT, SERVED, RankChecks, answer, distance, make_jobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


class TestOnTwoGPUs(RankChecks):
    @pytest.fixture(scope="class")
    def answers(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("ranks")
        one, two = make_jobs(folder, {"gpu_memory_utilization": 0.05})  # has to be free, no more
        # All at once: an engine takes most of a minute to start.
        groups = [({name: job}, {**ENVIRONMENT, **SERVED}) for name, job in two.items()]
        groups += [({name: job}, {}) for name, job in one.items()]
        return answer(groups, folder, at_once=len(groups))

    def test_two_ranks_differ_from_one_no_more_than_vllm_itself(self, answers):
        """Sharing K rounds partial sums to bfloat16, which moves the twin as well.

        The twin holds the same matrices, so what separates it from us on the same ranks are the
        roundings of other sums in float32, far below those of bfloat16.
        """
        noise = distance(answers, "twin", "twin on two")
        assert noise > 0
        assert distance(answers, "nvfp4", "twin") <= 2 * noise
        assert distance(answers, "nvfp4 on two", "twin on two") <= 2 * noise
