"""Two GPUs that share a model decide alike, bit for bit, or their tokens would part.

make test-gpu          (needs vLLM and two GPUs; skipped elsewhere)
"""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

import pytest
import torch

from tests.reset.vllm.ranks import RankChecks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


class TestOnTwoGPUs(RankChecks):
    """All of them; vLLM asks for this share of the memory to be free, and uses less."""

    OPTIONS: ClassVar[dict[str, Any]] = {"gpu_memory_utilization": 0.05}
