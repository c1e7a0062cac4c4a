"""Activations under a static scale: the weight quantiser's rounding, saturation made visible."""

import math

import pytest
import torch

from nvfp4r import reference
from nvfp4r.quantize import global_scale_from_amax, quantize, quantize_activations

ONE = torch.tensor(1.0)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def rough_activations(dtype, magnitude):
    x = torch.randn(2, 20, 128, generator=torch.Generator().manual_seed(0)) * magnitude
    x[0, 3] *= 100
    x[0, 4, 16:48] = 0.0
    x[1, 5] = 0.0
    x[1, 6] *= 1e-4
    return x.clamp(-6e4, 6e4).to(dtype)


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("scale", [1e-5, 0.01, 1.0, 1 / 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bit_identical_to_the_reference_and_exact_in_half_precision(dtype, magnitude, scale):
    x, input_scale = rough_activations(dtype, magnitude), torch.tensor(scale)
    values, saturated = quantize_activations(x, input_scale)
    truth, truth_saturated = reference.quantize_activations(x, input_scale)
    assert values.dtype == torch.float32
    assert torch.equal(values, truth.float())
    assert torch.equal(values.half().float(), values)
    assert saturated.dtype == torch.int64
    assert int(saturated) == truth_saturated


def test_weights_and_activations_round_alike():
    x = rough_activations(torch.bfloat16, 1.0)[0]
    tensor = quantize(x)
    values, saturated = quantize_activations(x, tensor.global_scale)
    assert torch.equal(values * tensor.global_scale, tensor.dequantize())
    assert saturated == 0


@pytest.mark.parametrize("leading", [(), (0,), (1,), (5, 0, 2), (2, 3, 4), (9000,)])
def test_any_leading_shape(leading):
    x = torch.randn(*leading, 64, generator=torch.Generator().manual_seed(1))
    values, saturated = quantize_activations(x, torch.tensor(0.01))
    assert values.shape == x.shape
    assert saturated.shape == ()
    if x.numel():
        truth, _ = reference.quantize_activations(x, torch.tensor(0.01))
        assert torch.equal(values, truth.float())


def test_q1_saturation_starts_above_464():
    x = torch.zeros(6, 16)
    x[:, 0] = 6 * torch.tensor([448.0, 460.0, 464.0, 470.0, 500.0, 5000.0])
    values, saturated = quantize_activations(x, ONE)
    assert values[:, 0].tolist() == [2688.0] * 6
    assert saturated == 3


def test_q2_all_zero_activations_stay_zero():
    x = torch.zeros(3, 64)
    values, saturated = quantize_activations(x, global_scale_from_amax(x.abs().amax(), "x"))
    assert torch.equal(values, torch.zeros(3, 64))
    assert saturated == 0


def test_q6_values_above_the_calibrated_maximum_are_counted():
    x = torch.linspace(-40, 40, 64)
    values, saturated = quantize_activations(x, global_scale_from_amax(10.0, "x"))
    assert saturated == 4  # every block exceeds 10 somewhere
    assert (values * global_scale_from_amax(10.0, "x")).abs().max() < 10.01


def test_q6_headroom_keeps_them_within_7_percent():
    """The largest value of each block is off by its E4M3 scale's rounding at most, 1/16."""
    x = torch.linspace(-40, 40, 64)
    scale = global_scale_from_amax(10.0, "x", headroom=4.0)
    values, saturated = quantize_activations(x, scale)
    assert saturated == 0
    largest = x.view(4, 16).abs().amax(-1)
    error = (values * scale).view(4, 16).abs().amax(-1) / largest - 1
    assert error.abs().max() < 0.07


def test_k8_a_zero_block_contributes_nothing():
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    x[0, 16:32] = 0.0
    x[1] = 0.0
    values, _ = quantize_activations(x, torch.tensor(1e-3))
    assert torch.isfinite(values).all()
    y = values.double() @ torch.ones(64, dtype=torch.float64)
    rest = torch.cat([x[0, :16], x[0, 32:]]).view(1, 48)
    assert y[0] == reference.quantize_activations(rest, torch.tensor(1e-3))[0].sum()
    assert y[1] == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_activations_stay_visible_in_their_block_alone(bad):
    x = torch.ones(2, 48)
    x[1, 20] = bad
    values, _ = quantize_activations(x, torch.tensor(0.01))
    is_nan = torch.zeros(2, 48, dtype=torch.bool)
    is_nan[1, 16:32] = True
    assert torch.equal(torch.isnan(values), is_nan)


@pytest.mark.parametrize(
    ("x", "input_scale", "error", "message"),
    [
        ([1.0] * 16, ONE, TypeError, "activations: got a list"),
        (torch.ones(16).double(), ONE, TypeError, "activations: got dtype torch.float64"),
        (torch.ones(2, 24), ONE, ValueError, r"activations: got shape \[2, 24\]"),
        (torch.ones(2, 0), ONE, ValueError, r"activations: got shape \[2, 0\]"),
        (torch.ones(16), 1.0, TypeError, "input_scale is a float"),
        (torch.ones(16), ONE.double(), TypeError, "input_scale has dtype torch.float64"),
        (torch.ones(16), torch.ones(1), ValueError, r"input_scale has shape \[1\], need \[\]"),
        (torch.ones(16), torch.tensor(0.0), ValueError, "input_scale is 0.0"),
        (torch.ones(16), torch.tensor(-1.0), ValueError, "input_scale is -1.0"),
        (torch.ones(16), torch.tensor(math.nan), ValueError, "input_scale is nan"),
        (torch.ones(16), torch.tensor(math.inf), ValueError, "input_scale is inf"),
    ],
)
def test_arguments_that_are_refused(x, input_scale, error, message):
    with pytest.raises(error, match=message):
        quantize_activations(x, input_scale)
