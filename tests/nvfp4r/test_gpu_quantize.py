"""On a CUDA GPU: quantising and dequantising give the bits that the CPU gives.

    make test-gpu

The CPU is the truth here because it is itself compared with the float64 reference, bit by bit.
"""

from __future__ import annotations

import math

import pytest
import torch

import nvfp4r.ops  # noqa: F401 - registers torch.ops.nvfp4r
from nvfp4r import NVFP4Linear, NVFP4Tensor, quantize, quantize_activations
from nvfp4r.quantize import global_scale_from_amax
from tests.nvfp4r.test_activations import rough_activations
from tests.nvfp4r.test_quantize import MIDPOINTS

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 16), (7, 48), (130, 80), (256, 4096), (4100, 1024)]


def assert_same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.dtype == other.dtype
    as_bytes = [tensor.cpu().contiguous().view(torch.uint8) for tensor in (one, other)]
    assert torch.equal(*as_bytes)


def assert_same_tensor(got: NVFP4Tensor, expected: NVFP4Tensor) -> None:
    assert got.device.type == DEVICE
    assert_same_bits(got.codes, expected.codes)
    assert_same_bits(got.block_scale, expected.block_scale)
    assert torch.equal(got.global_scale.cpu(), expected.global_scale)


def rough_weight(N: int, K: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different size, zero blocks and a zero row."""
    generator = torch.Generator().manual_seed(N + K)
    weight = torch.randn(N, K, generator=generator)
    weight *= 10.0 ** torch.randint(-4, 2, (N, 1), generator=generator)
    weight[:, :16] *= torch.rand(N, 1, generator=generator) < 0.5
    weight[N // 2] = 0.0
    return weight.to(dtype)


def tie_weight(exponent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row b: every midpoint of E2M1 under E4M3 scale byte b, both signs; and the global scale."""
    scale_bytes = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    steps = scale_bytes.float().view(-1, 1) * 2.0**exponent  # [126, 1]
    ties = torch.cat([6 * steps, steps * torch.tensor(MIDPOINTS)], dim=1)  # 6 fixes the scale
    return torch.cat([ties, -ties], dim=1), torch.tensor(2.0**exponent)  # [126, 16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_weights(N, K, dtype):
    weight = rough_weight(N, K, dtype)
    assert_same_tensor(quantize(weight.to(DEVICE)), quantize(weight))


@pytest.mark.parametrize("exponent", [-100, -3, 0, 40])
def test_ties_under_every_block_scale_subnormal_ones_included(exponent):
    weight, scale = tie_weight(exponent)
    expected = quantize(weight, global_scale=scale)
    assert expected.block_scale.view(torch.uint8).flatten().tolist() == list(range(1, 127))
    assert_same_tensor(quantize(weight.to(DEVICE), global_scale=scale), expected)


@pytest.mark.parametrize("scale", [1e-3, 2.0**-20])
def test_weights_beyond_the_largest_and_below_the_smallest_block_scale(scale):
    weight = rough_weight(64, 256, torch.float32) * 50
    expected = quantize(weight, global_scale=torch.tensor(scale))
    assert {0x01, 0x7E} <= set(expected.block_scale.view(torch.uint8).flatten().tolist())
    assert_same_tensor(quantize(weight.to(DEVICE), global_scale=torch.tensor(scale)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_row", [False, True])
def test_dequantising_every_byte_under_every_block_scale(dtype, per_row):
    """Row b: the 256 bytes under scale byte b, 32 blocks of them."""
    codes = torch.arange(256, dtype=torch.uint8).expand(126, -1).contiguous()
    scale_bytes = torch.arange(1, 127, dtype=torch.uint8).view(-1, 1).expand(-1, 32).contiguous()
    scale = torch.full((126,), 1 / 3) if per_row else torch.tensor(1 / 3)
    tensor = NVFP4Tensor(codes, scale_bytes.view(torch.float8_e4m3fn), scale)
    assert_same_bits(tensor.to(DEVICE).dequantize(dtype), tensor.dequantize(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("scale", [1e-5, 0.01, 1 / 3])
def test_activations(dtype, magnitude, scale):
    x, input_scale = rough_activations(dtype, magnitude), torch.tensor(scale)
    x[1, 7, 20] = math.nan
    x[1, 8, 40] = math.inf
    values, saturated = quantize_activations(x, input_scale)
    assert values.isnan().sum() == 2 * 16
    for quantise in (quantize_activations, torch.ops.nvfp4r.quantize):
        got, got_saturated = quantise(x.to(DEVICE), input_scale.to(DEVICE))
        torch.testing.assert_close(got.float().cpu(), values, rtol=0, atol=0, equal_nan=True)
        assert got_saturated.cpu() == saturated


def test_ties_of_activations():
    x, input_scale = tie_weight(-3)
    values, _ = quantize_activations(x, input_scale)
    got, _ = quantize_activations(x.to(DEVICE), input_scale.to(DEVICE))
    assert_same_bits(got, values)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("exponent", [-6, -3, 0])
def test_ties_in_the_kernel(exponent, dtype):
    """A midpoint of at most 3 bits times a scale of 4 is exact in 16 bits: ties stay ties."""
    x, input_scale = tie_weight(exponent)
    x = x[x.abs().amax(1) <= torch.finfo(dtype).max / 2]
    assert torch.equal(x.to(dtype).float(), x)
    values, _ = quantize_activations(x, input_scale)
    got, _ = torch.ops.nvfp4r.quantize(x.to(DEVICE, dtype), input_scale.to(DEVICE))
    assert_same_bits(got.float(), values)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("scale", [1.0, 1 / 3, 3.7e-3, 1e-30, 1e30])
def test_every_16_bit_number_as_the_largest_of_its_block(dtype, scale):
    x = torch.zeros(1 << 16, 16, dtype=torch.int16)
    x[:, 0] = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    x[:, 7] = x[:, 0] - 0x40  # something below it
    x = x.view(dtype)
    values, saturated = quantize_activations(x, torch.tensor(scale))
    got, got_saturated = torch.ops.nvfp4r.quantize(x.to(DEVICE), torch.tensor(scale, device=DEVICE))
    torch.testing.assert_close(got.float().cpu(), values, rtol=0, atol=0, equal_nan=True)
    assert int(got_saturated) == int(saturated)


def test_a_view_that_starts_between_16_bytes():
    x = torch.randn(33, device=DEVICE).bfloat16()[1:]
    got, _ = torch.ops.nvfp4r.quantize(x, torch.tensor(0.01, device=DEVICE))
    values, _ = quantize_activations(x.cpu(), torch.tensor(0.01))
    assert_same_bits(got.float(), values)


def test_a_layer_with_quantised_activations_does_not_wait_for_the_device():
    x = torch.randn(4, 256, device=DEVICE, dtype=torch.bfloat16)
    layer = NVFP4Linear(
        quantize(torch.randn(64, 256)).to(DEVICE),
        input_scale=global_scale_from_amax(10.0),
        activations="nvfp4",
    )
    expected = layer(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(y, expected)
