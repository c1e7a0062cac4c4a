"""The arithmetic of kernels/quantize.cuh, compiled for the host, against the Python functions.

The same source lines that a GPU runs, with the few PTX instructions replaced (host/decode.cuh): so
that a machine without a GPU sees whether rotating and rounding give the bits of the CPU path.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from nvfp4r.methods.rotation import rotate
from nvfp4r.quantize import quantize_activations
from tests.nvfp4r.on_host import compiled

ROTATE, QUANTIZE = 1, 2


@pytest.fixture(scope="module")
def prologue(tmp_path_factory):
    """The compiled function, called as (x in 16 bits, steps, scale) -> (values, saturated)."""
    library = compiled("prologue.cpp", tmp_path_factory.mktemp("host"), "quantize.cuh")
    function = library.prologue
    function.restype = ctypes.c_uint64
    function.argtypes = [
        *(ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_float),
    ]

    def call(x, steps, scale=0.0):
        values = x.clone()
        blocks, is_bf16 = x.numel() // 16, x.dtype == torch.bfloat16
        return values, function(values.data_ptr(), blocks, is_bf16, steps, scale)

    return call


def rough(dtype):
    """Rows of very different size, zero blocks, an outlier channel, an infinity and a NaN."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1000, 256, generator=generator)
    x *= 10.0 ** torch.randint(-6, 4, (1000, 1), generator=generator)
    x[:, 17] *= 50
    x[::7, :16] = 0
    x[3, 5], x[4, 40], x[5, 0] = float("inf"), float("nan"), -float("inf")
    return x.to(dtype)


def assert_same_bits(got, expected):
    nan = expected.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got[~nan].view(torch.int16), expected[~nan].view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 0.0123, 1.0, 2.0**-20, 3e5])
def test_quantised(prologue, dtype, turned, scale):
    x = rough(dtype)
    values, saturated = quantize_activations(rotate(x) if turned else x, torch.tensor(scale))
    got, got_saturated = prologue(x, QUANTIZE | (ROTATE if turned else 0), scale)
    assert_same_bits(got, values.to(dtype))
    assert got_saturated == int(saturated)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotated_alone_is_rounded_once(prologue, dtype):
    x = rough(dtype)
    got, _ = prologue(x, ROTATE)
    assert_same_bits(got, rotate(x).to(dtype))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_scale_shows_as_nan(prologue, scale):
    got, saturated = prologue(torch.ones(4, 16, dtype=torch.bfloat16), QUANTIZE, scale)
    assert bool(got.isnan().all())
    assert saturated == 0
