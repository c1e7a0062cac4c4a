"""Kernel sources compiled for the host by g++, with the few PTX instructions of tests/nvfp4r/host.

So that a machine without a GPU runs the very lines that a GPU runs.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nvfp4r.jit import kernel_sources
from nvfp4r.launches import _ARRANGE

HOST = Path(__file__).parent / "host"


def compiled(entry: str, folder: Path, *sources: str) -> ctypes.CDLL:
    """tests/nvfp4r/host/<entry> as a library, together with some of the kernel sources.

    Args:
        folder: an empty one.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        assert not os.environ.get("CI"), "CI needs g++"
        pytest.skip("no g++")
    for file in HOST.iterdir():
        shutil.copy(file, folder)
    for name in sources:
        (folder / name).write_text(kernel_sources()[name])
    library = folder / "library.so"
    # The arithmetic has no a * b + c to contract; the flag makes sure of it.
    flags = ["-O1", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-w"]
    subprocess.run([compiler, *flags, folder / entry, "-o", library], check=True)
    return ctypes.CDLL(str(library))


class ArrangeOnHost:
    """kernels/arrange.cuh, and the descriptor of kernels/wgmma.cuh.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        library = compiled("arrange.cpp", folder, "quantize.cuh", "arrange.cuh", "wgmma.cuh")
        self._arrange = library.arrange_on_host
        self._arrange.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int]
        self._arrange.restype = None
        self.argument_bytes: int = library.argument_bytes()
        self._descriptor = library.descriptor
        self._descriptor.argtypes = [ctypes.c_uint32]
        self._descriptor.restype = ctypes.c_uint64

    def __call__(
        self, x: Tensor, prologue: int = 0, scale: float | None = None, *, ctas: int = 3
    ) -> Tensor:
        """x [M, K] in its new order, [ceil(K / 64), ceil(M / 8), 512] in x's dtype.

        Args:
            prologue, scale: what is done to x on its way, as in kernels/quantize.cuh.
            ctas: of a grid; each takes 8 warps of 8 tokens x 64 columns at a time.
        """
        M, K = x.shape
        stages, groups = -(-K // 64), -(-M // 8)
        guarded = torch.full((stages * groups * 512 + 512,), float("nan"), dtype=x.dtype)
        input_scale = None if scale is None else torch.tensor(scale)
        scale_at = 0 if input_scale is None else input_scale.data_ptr()
        argument = _ARRANGE.pack(x.data_ptr(), guarded.data_ptr(), scale_at, M, K, prologue)
        self._arrange(argument, x.dtype == torch.bfloat16, ctas, 256)
        out, guard = guarded[:-512], guarded[-512:]
        assert bool(guard.isnan().all()), "written beyond the end"
        return out.view(stages, groups, 512)

    def offsets(self, address: int) -> tuple[int, int, int, int]:
        """Of the descriptor of `address`, in bytes: where it starts, to the other half of k16, to
        the next 8 columns; and the code of its swizzle."""
        bits = self._descriptor(address)
        low, leading, stride = bits & 0x3FFF, bits >> 16 & 0x3FFF, bits >> 32 & 0x3FFF
        return 16 * low, 16 * leading, 16 * stride, bits >> 62
