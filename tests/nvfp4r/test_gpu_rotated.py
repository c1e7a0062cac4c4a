"""On a CUDA GPU: layers whose inputs are rotated, against the CPU's bits and float64.

make test-gpu
"""

from __future__ import annotations

import pytest
import torch

from nvfp4r.launches import Layer, required_facts, run_prologue
from nvfp4r.methods.rotation import rotate
from nvfp4r.ops import gemm, linear, quantize
from nvfp4r.packed import ORDERS, pack
from nvfp4r.quantize import quantize as quantize_weight
from nvfp4r.tuning.matrix import truth_of
from tests.nvfp4r.test_prologue_on_host import assert_same_bits, rough

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_rotated_and_quantised_in_one_kernel(dtype, scale):
    x, scale = rough(dtype), torch.tensor(scale)
    expected, saturated = quantize(x, scale, "hadamard16")
    got, got_saturated = quantize(x.cuda(), scale.cuda(), "hadamard16")
    assert_same_bits(got.cpu(), expected)
    assert int(got_saturated) == int(saturated)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotated_alone_is_rounded_once(dtype):
    x = rough(dtype)
    got = run_prologue(x.cuda(), None, required_facts(0), rotation="hadamard16")
    assert_same_bits(got.cpu(), rotate(x).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(("N", "K"), [(24, 48), (1000, 448), (1024, 4096)])
@pytest.mark.parametrize("M", [1, 3, 8, 9, 33, 64, 65, 192, 200, 513])
def test_layers(dtype, quantised, N, K, M):
    """Inside the kernels or in one before them, and in front of a dense product, within the bound
    of the same layer on inputs that were rotated before."""
    generator = torch.Generator().manual_seed(N + K + M)
    weight = quantize_weight(torch.randn(N, K, generator=generator)).to("cuda")
    packed = pack(weight, ORDERS[dtype])
    x = torch.randn(M, K, generator=generator).to(dtype).cuda()
    scale = torch.tensor(8 / 2688, device="cuda") if quantised else None
    truth = truth_of(rotate(x) if quantised else rotate(x).to(dtype), weight, scale, dtype)
    layer = Layer(packed.tiles, packed.alpha, None, scale, N, K, ORDERS[dtype], "hadamard16")
    assert truth.excess(linear(x, *layer)) <= 1
    assert truth.excess(gemm(x, *layer)) <= 1
