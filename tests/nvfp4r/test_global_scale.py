"""The choice of the global scale and its exactness in both dialects."""

import math
from fractions import Fraction

import pytest
import torch

from nvfp4r import reference
from nvfp4r.format import NVFP4Tensor
from nvfp4r.quantize import divisor_for, global_scale_from_amax, quantize


def test_a1_a_multiplier_and_its_divisor_give_the_same_matrix():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    multiplier = torch.tensor(1 / 3584)
    tensor = quantize(weight, global_scale=multiplier)
    divisor = torch.tensor(3584.0)
    from_divisor = NVFP4Tensor(tensor.codes, tensor.block_scale, 1.0 / divisor)
    assert torch.equal(tensor.dequantize(), from_divisor.dequantize())
    assert torch.equal(divisor_for(multiplier), divisor)


def test_every_significand_moves_by_one_unit_at_most_and_keeps_a_divisor():
    wanted = (torch.arange(1 << 23, dtype=torch.int32) + (127 << 23)).view(torch.float32)
    scale = 1.0 / (1.0 / wanted)  # what global_scale_from_amax computes, over one whole binade
    moved = (scale.view(torch.int32) - wanted.view(torch.int32)).abs()
    assert moved.max() == 1
    assert torch.equal(1.0 / (1.0 / scale), scale)

    # No float32 near the reciprocal works where the nearest fails: these scales have no divisor.
    fails = (1.0 / (1.0 / wanted)) != wanted
    for direction in (0.0, math.inf):
        other = 1.0 / wanted
        for _ in range(2):
            other = torch.nextafter(other, torch.full_like(other, direction))
            assert not ((1.0 / other) == wanted)[fails].any()
    assert 0.16 < fails.float().mean() < 0.18  # the "one in six" of docs/format.md


def significant_bits(value):
    odd = int(math.frexp(value)[0] * 2**53)
    return (odd // (odd & -odd)).bit_length()


@pytest.mark.parametrize("exponent", [-126, -100, -12, 0, 30, 116, 126])
def test_divisors_agree_with_rational_arithmetic(exponent):
    """The roundest of all divisors is found, and none where there is none."""
    significands = 1 + torch.rand(40, generator=torch.Generator().manual_seed(1))
    for scale in torch.cat([torch.ones(1), significands]) * 2.0**exponent:
        found, expected = divisor_for(scale), reference.divisors(float(scale))
        if expected:
            assert float(found) in expected
            assert significant_bits(float(found)) == min(map(significant_bits, expected))
        else:
            assert found is None


@pytest.mark.parametrize("amax", [10.0, 0.0371, 1e-20, 3e38, 1e-30])
@pytest.mark.parametrize("headroom", [1.0, 1.1])
def test_the_scale_is_amax_over_2688_to_the_last_bit_but_one(amax, headroom):
    amax_tensor = torch.tensor(amax)
    scale = global_scale_from_amax(amax_tensor, "layer", headroom)
    assert scale.dtype == torch.float32
    assert scale.shape == ()
    wanted = torch.tensor(reference.nearest_float32(Fraction(float(amax_tensor) * headroom) / 2688))
    assert abs(int(scale.view(torch.int32)) - int(wanted.view(torch.int32))) <= 1
    divisor = divisor_for(scale)
    assert divisor is not None
    assert reference.nearest_float32(1 / Fraction(float(divisor))) == float(scale)


def test_a_number_and_a_tensor_give_the_same_scale():
    assert torch.equal(global_scale_from_amax(3.5), global_scale_from_amax(torch.tensor([[3.5]])))


def test_q2_zero_amax_gives_a_usable_scale_and_names_the_layer(caplog):
    scale = global_scale_from_amax(0.0, "layers.3.mlp.down_proj")
    assert float(scale) == 1.0
    assert divisor_for(scale) is not None
    assert "layers.3.mlp.down_proj: the largest magnitude is 0" in caplog.text


@pytest.mark.parametrize("amax", [1e-45, 2.0**-130, 1e-36])
def test_tiny_amax_is_floored_without_a_warning(amax, caplog):
    scale = global_scale_from_amax(amax)
    assert float(scale) == 2.0**-126
    assert torch.isfinite(divisor_for(scale))
    assert not caplog.text


@pytest.mark.parametrize(
    ("amax", "headroom", "message"),
    [
        (-1.0, 1.0, "amax is -1.0, need a finite number >= 0"),
        (math.nan, 1.0, "amax is nan"),
        (math.inf, 1.0, "amax is inf"),
        (torch.ones(2), 1.0, r"amax has shape \[2\], need one number"),
        (1.0, 0.5, "headroom is 0.5, need a finite factor >= 1"),
        (1.0, math.nan, "headroom is nan"),
        (1.0, math.inf, "headroom is inf"),
        (3e38, 2.0, r"amax 3e\+38 with headroom 2.0 exceeds float32; lower the headroom"),
    ],
)
def test_amax_and_headroom_are_checked(amax, headroom, message):
    with pytest.raises(ValueError, match=f"layer: {message}"):
        global_scale_from_amax(amax, "layer", headroom)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_no_divisor_is_looked_for_where_there_is_no_scale(value):
    with pytest.raises(ValueError, match=f"divisor_for: global_scale is {value}"):
        divisor_for(torch.tensor(value))


def test_a_scale_too_small_for_a_finite_divisor_has_none():
    assert divisor_for(torch.tensor(2.0**-149)) is None
