"""The kernel cases on a CPU. Run by test_triton.py in a process of its own, since the interpreter
is chosen, for every kernel of a process, when Triton is imported:

    TRITON_INTERPRET=1 python -m pytest tests/reset/interpreted_kernels.py
"""

from __future__ import annotations

import pytest
import torch

from tests.reset.kernel_cases import KernelCases

# The interpreter computes with NumPy, which warns where a GPU gives the same NaN or inf silently.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class TestInterpreted(KernelCases):
    device = "cpu"
    calls = 12

    def stored(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The interpreter cuts off float32 where a GPU rounds to bfloat16."""
        if dtype == torch.bfloat16:
            return (values.view(torch.int32) & -65536).view(torch.float32).to(dtype)
        return values.to(dtype)
