"""The rotation against float64 and against its own order of additions; weights in its basis."""

from __future__ import annotations

import math

import pytest
import torch

from nvfp4r import reference
from nvfp4r.format import unpack_codes
from nvfp4r.methods.rotation import hadamard16, quantize_rotated, rotate, rotated_amax
from nvfp4r.quantize import global_scale_from_amax

UNIT = 2.0**-24  # half a unit in the last place of float32 in [1, 2), relative
FOUR_SUMS = 4 * UNIT / (1 - 4 * UNIT)
"""Largest error of `rotate` in float32, relative to a quarter of the sum of the block's
magnitudes: four additions stand between any input and the result."""


def random(*shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_matrix_is_sylvesters_and_its_own_inverse():
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    expected = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        expected = torch.kron(expected, two)
    matrix = hadamard16(torch.float64)
    assert torch.equal(matrix, expected / 4)
    assert torch.equal(matrix, matrix.T)
    assert torch.equal(matrix @ matrix, torch.eye(16, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_matrix_is_exact_in_short_formats(dtype):
    assert hadamard16().dtype == torch.float32
    assert hadamard16(dtype).dtype == dtype
    assert torch.equal(hadamard16(dtype).double(), hadamard16(torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_hot_inputs_read_the_rows_of_the_matrix(dtype):
    rotated = rotate(torch.eye(48, dtype=dtype))
    assert torch.equal(rotated, torch.block_diag(*[hadamard16(rotated.dtype)] * 3))


def scalar_rotate(values):
    """A block in float32, step by step: sums and differences 1, 2, 4 and 8 apart."""
    values = [torch.tensor(value) for value in values]
    for distance in (1, 2, 4, 8):
        for i in range(16):
            if not i & distance:
                a, b = values[i], values[i + distance]
                values[i], values[i + distance] = a + b, a - b
    return torch.stack(values) / 4


@pytest.mark.parametrize("scale", [1e-38, 1.0, 1e30])
def test_the_order_of_additions_is_the_promised_one(scale):
    """Bit by bit, so that a kernel that adds in this order gives the same codes."""
    x = random(8, 32, seed=1, scale=scale)
    expected = torch.stack([scalar_rotate(block.tolist()) for block in x.view(-1, 16)])
    assert torch.equal(rotate(x), expected.view(8, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_close_to_float64_by_the_bound_of_four_additions(dtype):
    x = random(64, 128, seed=2).to(dtype)
    x[:, 5] *= 1000
    blocks = x.double().view(-1, 16)
    exact = (blocks @ hadamard16(torch.float64)).view(64, 128)
    bound = FOUR_SUMS * blocks.abs().sum(1, keepdim=True).expand(-1, 16).reshape(64, 128) / 4
    rotated = rotate(x)
    assert rotated.dtype == torch.float32
    assert ((rotated.double() - exact).abs() <= bound).all()


def test_twice_is_the_identity_where_sums_are_exact():
    integers = torch.randint(-(1 << 19), 1 << 19, (32, 64), generator=torch.Generator())
    assert torch.equal(rotate(rotate(integers.float())), integers.float())


def test_lengths_and_products_are_kept():
    x, y = random(4, 64, seed=3).double(), random(4, 64, seed=4).double()
    assert rotate(x).dtype == torch.float64
    assert torch.allclose(rotate(x) @ rotate(y).T, x @ y.T, rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 32), (0, 32), (5, 0)])
def test_any_leading_shape(shape):
    x = random(*shape, seed=5)
    rotated = rotate(x)
    assert rotated.shape == x.shape
    for got, alone in zip(rotated.view(-1, 16), x.view(-1, 16), strict=True):
        assert torch.equal(got, rotate(alone))


def test_a_transposed_view_is_rotated_like_its_copy():
    view = random(64, 48, seed=6).T
    assert torch.equal(rotate(view), rotate(view.contiguous()))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_within_its_block(bad):
    x = random(2, 48, seed=7)
    clean = rotate(x)
    x[1, 20] = bad
    rotated = rotate(x)
    assert not torch.isfinite(rotated[1, 16:32]).any()
    rotated[1, 16:32] = clean[1, 16:32]
    assert torch.equal(rotated, clean)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(2, 24), ValueError, r"got shape \[2, 24\], need .* a multiple of 16"),
        (torch.tensor(1.0), ValueError, r"got shape \[\]"),
        (torch.zeros(16, dtype=torch.int32), TypeError, "got dtype torch.int32, need a floating"),
    ],
)
def test_inputs_that_cannot_be_rotated(x, error, message):
    with pytest.raises(error, match=f"rotate: {message}"):
        rotate(x)


def exact_rotate(weight):
    return (weight.double().unflatten(-1, (-1, 16)) @ hadamard16(torch.float64)).flatten(-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(33, 64), (520, 1024), (2, 16 * 33_000)])
def test_weights_are_quantised_as_the_reference_does_in_the_rotated_basis(dtype, shape):
    """More rows than one chunk holds and rows longer than one, too."""
    weight = random(*shape, seed=8, scale=0.02).to(dtype)
    tensor = quantize_rotated(weight)
    rotated = rotate(weight)
    assert rotated_amax(weight) == rotated.abs().max()
    assert torch.equal(tensor.global_scale, global_scale_from_amax(rotated.abs().max()))
    some = slice(None) if shape[0] < 100 else slice(shape[0] - 2, None)
    codes, scale_bytes, _ = reference.quantize(rotated[some, :4096], tensor.global_scale)
    assert torch.equal(unpack_codes(tensor.codes)[some, :4096], codes)
    assert torch.equal(tensor.block_scale.view(torch.uint8)[some, :256], scale_bytes)


def test_rotated_back_the_matrix_is_as_near_as_the_rotated_one():
    """Orthogonal, so that both errors have one length."""
    weight = random(64, 256, seed=9)
    tensor = quantize_rotated(weight)
    error = reference.dequantize(tensor) - exact_rotate(weight)
    error_back = exact_rotate(reference.dequantize(tensor)) - weight.double()
    assert float(error_back.norm()) == pytest.approx(float(error.norm()), rel=1e-12)
    assert float(error_back.norm() / weight.norm()) < 0.11


def test_a_rotated_layer_computes_what_the_layer_did():
    """Exactly, for a matrix whose rotation NVFP4 holds exactly and inputs whose sums are exact."""
    generator = torch.Generator().manual_seed(11)
    rotated = torch.randint(-4, 5, (32, 64), generator=generator).float()
    rotated[:, ::16] = 6.0
    weight = rotate(rotated)
    tensor = quantize_rotated(weight, global_scale=torch.tensor(1.0))
    assert torch.equal(tensor.dequantize(), rotated)
    x = torch.randint(-8, 9, (5, 64), generator=generator).float()
    y = reference.linear(rotate(x), tensor)
    assert torch.equal(y, x.double() @ weight.double().T)


def test_a_shared_scale_is_used():
    weight = random(16, 32, seed=12)
    scale = torch.tensor(0.01)
    tensor = quantize_rotated(weight, global_scale=scale)
    assert torch.equal(tensor.global_scale, scale)
    codes, _, _ = reference.quantize(rotate(weight), scale)
    assert torch.equal(unpack_codes(tensor.codes), codes)


@pytest.mark.parametrize("make", [quantize_rotated, rotated_amax])
def test_weights_that_cannot_be_rotated_are_named(make):
    weight = torch.zeros(4, 32)
    weight[1, 3] = math.nan
    with pytest.raises(ValueError, match=r"q_proj: 1 of 128 weights are NaN .* \[1, 3\]"):
        make(weight, name="q_proj")
    with pytest.raises(ValueError, match=r"q_proj: weights reach 3e\+37, need 2.13e\+37 or less"):
        make(torch.full((1, 16), 3e37), name="q_proj")
    with pytest.raises(ValueError, match=r"q_proj: got shape \[4, 24\]"):
        make(torch.zeros(4, 24), name="q_proj")


def test_the_largest_weights_that_can_be_rotated():
    weight = torch.full((1, 16), 2.0**123)
    assert rotated_amax(weight) == 2.0**125
    assert torch.isfinite(quantize_rotated(weight).validate("weight").dequantize()).all()


def test_a_matrix_of_zeros_stays_zero():
    assert not quantize_rotated(torch.zeros(4, 32)).validate("weight").codes.any()
