"""GPTQ against a slow float64 form of it, and what it must do for a layer's outputs."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from nvfp4r import reference
from nvfp4r.format import unpack_codes
from nvfp4r.methods.gptq import HessianSum, factorise, quantize_gptq
from nvfp4r.quantize import global_scale_from_amax, quantize


def optimal_brain(weight: Tensor, hessian: Tensor, damping: float, scale: Tensor):
    """Codes [N, K] and scale bytes [N, K/16], by the textbook: an explicit inverse that loses a row
    and a column with each column that is rounded. All in float64; sees no Cholesky factor."""
    w = weight.double().clone()
    live = hessian.diagonal() != 0
    h = hessian.double().clone()
    h.diagonal()[~live] = h.diagonal()[live].mean()
    h += damping * h.diagonal()[live].mean() * torch.eye(len(h), dtype=torch.float64)
    inverse = torch.linalg.inv(h)
    N, K = w.shape
    codes = torch.empty((N, K), dtype=torch.uint8)
    scale_bytes = torch.empty((N, K // 16), dtype=torch.uint8)
    for j in range(K):
        if j % 16 == 0:
            unrounded = w[:, j : j + 16].abs().amax(1) / (6 * float(scale))
            block = reference.encode_e4m3(unrounded.clamp(2.0**-9, 448.0))
            scale_bytes[:, j // 16] = block
            step = torch.tensor([reference.e4m3(int(b)) for b in block]).double() * float(scale)
        codes[:, j] = reference.encode_e2m1(w[:, j] / step)
        values = torch.tensor([reference.e2m1(int(c)) for c in codes[:, j]]).double() * step
        w -= torch.outer((w[:, j] - values) / inverse[j, j], inverse[j])
        inverse -= torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j] = inverse[:, j] = 0
    return codes, scale_bytes


def correlated(tokens: int, K: int, seed: int = 0) -> Tensor:
    """Inputs of which neighbours resemble each other and a few are large. [tokens, K] float32"""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, K, generator=random)
    mix = torch.eye(K) + 0.5 * torch.randn(K, K, generator=random) / K**0.5
    x = x @ mix + 0.7 * torch.randn(tokens, 1, generator=random)
    x[:, ::11] *= 4
    return x


def weights(N: int, K: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed)).to(dtype)


def summed(x: Tensor, dtype: torch.dtype = torch.float32, name: str = "layer") -> HessianSum:
    total = HessianSum(x.shape[-1], name=name, dtype=dtype)
    total.add(x)
    return total


def scale_of(weight: Tensor) -> Tensor:
    return global_scale_from_amax(float(weight.abs().max()))


def output_error(x: Tensor, weight: Tensor, quantised) -> float:
    """||X (W - Q)^T||, in float64."""
    error = weight.double() - reference.dequantize(quantised)
    return float((x.double() @ error.T).norm())


def assert_same(quantised, other):
    assert torch.equal(quantised.codes, other.codes)
    assert torch.equal(quantised.block_scale.view(torch.uint8), other.block_scale.view(torch.uint8))
    assert torch.equal(quantised.global_scale, other.global_scale)


@pytest.mark.parametrize("hessian_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("K", [16, 48, 272])  # one block; several; more than two groups
def test_codes_are_those_of_the_textbook(K, hessian_dtype):
    x, weight = correlated(2000, K), weights(12, K)
    scale = scale_of(weight)
    total = summed(x, hessian_dtype)
    quantised = quantize_gptq(weight, factorise(total, 0.01), global_scale=scale)
    codes, scale_bytes = optimal_brain(weight, x.double().T @ x.double(), 0.01, scale)
    assert torch.equal(quantised.block_scale.view(torch.uint8), scale_bytes)
    assert torch.equal(unpack_codes(quantised.codes), codes)
    assert not torch.equal(codes, unpack_codes(quantize(weight, global_scale=scale).codes))


def test_two_columns_by_hand():
    """Inputs 0 and 1 are always equal, so an error in one is made up for by the other.

    Column 15 sets the block scale to 1 (global scale 1, largest weight 6). Column 0 is 0.7 and
    becomes 0.5; without damping column 1, 0.7 too, would have to be 0.9. It becomes 1, where
    rounding to nearest gives 0.5.
    """
    weight = torch.zeros(1, 16)
    weight[0, :2], weight[0, 15] = 0.7, 6.0
    x = torch.eye(16)
    x[0, 1] = 1.0  # the first token has both inputs, the second has neither
    x[1, 1] = 0.0
    quantised = quantize_gptq(
        weight, factorise(summed(x), 1e-3), global_scale=torch.tensor(1.0), name="w"
    )
    assert quantised.dequantize()[0].tolist() == [0.5, 1.0, *[0.0] * 13, 6.0]
    assert quantize(weight, global_scale=torch.tensor(1.0)).dequantize()[0, 1] == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("diagonal", ["ones", "spread", "some dead"])
def test_without_correlation_it_is_rounding_to_nearest(dtype, diagonal):
    """Ties, zeros, minus zeros and saturation included."""
    weight = weights(32, 160, dtype)
    weight[0] = torch.arange(160) % 16 * 0.25 - 2  # many ties
    weight[1], weight[2, 5], weight[3] = 0, -0.0, weight[3] * 1000
    scale = scale_of(weight[4:])  # row 3 saturates
    total = HessianSum(160, name="layer")
    entries = {"ones": torch.ones(160), "spread": torch.logspace(-3, 3, 160)}
    entries["some dead"] = (torch.arange(160) % 3 > 0).float()
    total.matrix.diagonal().copy_(entries[diagonal])
    total.tokens = 1000
    quantised = quantize_gptq(weight, factorise(total), global_scale=scale)
    assert_same(quantised, quantize(weight, global_scale=scale))


@pytest.mark.parametrize("seed", range(3))
def test_output_error_is_well_below_rounding_to_nearest(seed):
    x, weight = correlated(1000, 256, seed), weights(64, 256, seed=seed + 10)
    scale = scale_of(weight)
    quantised = quantize_gptq(weight, factorise(summed(x)), global_scale=scale)
    nearest = quantize(weight, global_scale=scale)
    assert output_error(x, weight, quantised) < 0.8 * output_error(x, weight, nearest)


def test_rows_do_not_see_each_other():
    """So q, k and v may be rounded as one matrix."""
    x, weight = correlated(500, 64), weights(40, 64)
    scale, factor = scale_of(weight), factorise(summed(x))
    whole = quantize_gptq(weight, factor, global_scale=scale)
    part = quantize_gptq(weight[8:24], factor, global_scale=scale)
    assert torch.equal(whole.codes[8:24], part.codes)


def test_sums_do_not_depend_on_how_tokens_are_cut():
    x = correlated(300, 32).double()
    whole = summed(x, torch.float64)
    cut = HessianSum(32, name="layer", dtype=torch.float64)
    for part in (x[:1], x[1:7].view(2, 3, 32), x[7:]):
        cut.add(part)
    torch.testing.assert_close(whole.matrix, cut.matrix, rtol=1e-12, atol=0)
    torch.testing.assert_close(whole.matrix, x.T @ x, rtol=1e-12, atol=0)
    assert whole.tokens == cut.tokens == 300


def test_a_well_conditioned_hessian_is_not_called_singular(caplog):
    factor = factorise(summed(correlated(1000, 64)))
    assert (factor.is_singular, factor.damping, factor.dead_inputs) == (False, 0.01, 0)
    assert caplog.text == ""


@pytest.mark.parametrize("cause", ["few tokens", "equal inputs"])
def test_a_singular_hessian_is_damped_and_said(caplog, cause):
    x, weight = correlated(1000, 64), weights(16, 64)
    if cause == "few tokens":
        x = x[:20]
    else:
        x[:, 9] = x[:, 40]
    scale = scale_of(weight)
    level = logging.INFO if cause == "few tokens" else logging.WARNING
    with caplog.at_level(level):
        factor = factorise(summed(x, name="layers.3.up_proj"))
    assert factor.is_singular
    assert (
        "layers.3.up_proj: the Hessian of its 64 inputs is singular to within rounding over"
        in caplog.text
    )
    assert "damped by 0.01 of its mean diagonal" in caplog.text
    quantised = quantize_gptq(weight, factor, global_scale=scale).validate("layer")
    nearest = quantize(weight, global_scale=scale)
    assert output_error(x, weight, quantised) < output_error(x, weight, nearest)


def test_damping_grows_until_there_is_a_factor(caplog):
    """A sum that is indefinite by more than the damping, as rounding may leave it."""
    total = summed(correlated(1000, 16))
    mean = total.matrix.diagonal().mean()
    smallest = torch.linalg.eigvalsh(total.matrix)[0]
    total.matrix -= (smallest + 0.03 * mean) * torch.eye(16)
    mean = total.matrix.diagonal().mean()
    assert -0.1 * mean < torch.linalg.eigvalsh(total.matrix)[0] < -0.01 * mean
    factor = factorise(total, 0.01)
    assert factor.damping == pytest.approx(0.1)
    assert "damped by 0.1" in caplog.text
    product = factor.upper @ factor.upper.T
    wanted = total.matrix / mean + 0.1 * torch.eye(16)
    torch.testing.assert_close(product, wanted, rtol=1e-4, atol=1e-5)


def test_what_has_no_factor_at_the_largest_damping_is_refused():
    total = summed(torch.eye(16))
    total.matrix[0, 1] = total.matrix[1, 0] = 5.0  # no sum of squares
    with pytest.raises(ValueError, match="layer: the Hessian of its inputs has no factor, even wh"):
        factorise(total, 0.01)


@pytest.mark.parametrize(("tokens", "reason"), [(4, "had inputs of zero only"), (0, "saw no toke")])
def test_inputs_of_zero_mean_rounding_to_nearest(caplog, tokens, reason):
    weight = weights(8, 32)
    scale = scale_of(weight)
    factor = factorise(summed(torch.zeros(tokens, 32), name="layers.0.o_proj"))
    assert f"layers.0.o_proj: {reason}" in caplog.text
    assert_same(
        quantize_gptq(weight, factor, global_scale=scale), quantize(weight, global_scale=scale)
    )


def test_it_is_the_same_every_time():
    x, weight = correlated(500, 128), weights(32, 128)
    scale = scale_of(weight)
    first, second = (
        quantize_gptq(weight, factorise(summed(x)), global_scale=scale) for _ in range(2)
    )
    assert_same(first, second)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_inputs_are_refused_by_name(bad):
    x = torch.ones(4, 16)
    x[2, 3] = bad
    with pytest.raises(ValueError, match=r"layers\.1\.q_proj: 1 of 64 calibration inputs are NaN"):
        summed(x, name="layers.1.q_proj")


def test_what_does_not_fit_is_refused():
    total = HessianSum(32, name="layer")
    with pytest.raises(ValueError, match=r"layer: got inputs \[2, 16\], need \[..., 32\]"):
        total.add(torch.ones(2, 16))
    total.add(torch.full((2, 32), 1e20))
    with pytest.raises(ValueError, match="layer: its calibration inputs are too large"):
        factorise(total)
    for damping in (0.0, -0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="damping is"):
            factorise(summed(torch.ones(2, 16)), damping)
    factor = factorise(summed(correlated(100, 32)))
    with pytest.raises(ValueError, match="w: got a Hessian of 32 inputs, need K=16"):
        quantize_gptq(weights(2, 16), factor, global_scale=torch.tensor(1.0), name="w")
    weight = weights(2, 32)
    weight[1, 2] = float("nan")
    with pytest.raises(ValueError, match="w: 1 of 64 weights are NaN"):
        quantize_gptq(weight, factor, global_scale=torch.tensor(1.0), name="w")
