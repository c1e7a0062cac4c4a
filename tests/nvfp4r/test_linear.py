"""NVFP4Linear against float64, and bit for bit where arithmetic leaves no choice."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

from nvfp4r import reference
from nvfp4r.format import NVFP4Tensor
from nvfp4r.linear import NVFP4Linear
from nvfp4r.quantize import global_scale_from_amax, quantize

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)
UNIT = {dtype: torch.finfo(dtype).eps / 2 for dtype in DTYPES}  # relative error of one rounding


def nvfp4(codes, block_scale, global_scale=1.0):
    """From 4-bit codes [N, K] and block scales [N, K/16] given as plain lists or tensors."""
    codes = torch.as_tensor(codes, dtype=torch.uint8)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    scales = torch.as_tensor(block_scale, dtype=torch.float32).to(torch.float8_e4m3fn)
    return NVFP4Tensor(packed, scales, torch.as_tensor(global_scale, dtype=torch.float32))


ONE, SIX = 2, 7  # codes of 1.0 and 6.0


def constant(code, N, K, block_scales, global_scale=1.0):
    return nvfp4(torch.full((N, K), code), torch.tensor([block_scales]).expand(N, -1), global_scale)


def identity(K, global_scale=1.0):
    return nvfp4(ONE * torch.eye(K), torch.ones(K, K // 16), global_scale)


def random_layer(N=24, K=64, *, seed=0, bias_dtype=torch.float32, **options):
    torch.manual_seed(seed)
    return NVFP4Linear(quantize(torch.randn(N, K)), torch.randn(N).to(bias_dtype), **options)


W4A4 = {"input_scale": torch.tensor(0.002), "activations": "nvfp4"}


# --- against the dequantised matrix, without activation quantisation


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M", [*range(1, 9), 64])
def test_w4a16_is_torchs_linear_on_the_dequantised_matrix(M, dtype, keep):
    layer = random_layer(bias_dtype=dtype, keep_dequantized=keep)
    x = torch.randn(M, 64).to(dtype)
    expected = F.linear(x, layer.weight.dequantize(dtype), layer.bias)
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer(x), expected)  # from the kept copy, if there is one
    assert (layer._matrix is not None) == keep


def test_the_matrix_follows_the_dtype_of_x():
    layer = random_layer()
    for dtype in (*DTYPES, *DTYPES):
        x = torch.randn(3, 64).to(dtype)
        expected = F.linear(x, layer.weight.dequantize(dtype), layer.bias.to(dtype))
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("options", [{}, W4A4], ids=["W4A16", "W4A4"])
def test_leading_dimensions(options):
    layer = random_layer(**options)
    x = torch.randn(2, 3, 64)
    assert layer(x).shape == (2, 3, 24)
    assert torch.equal(layer(x), layer(x.reshape(6, 64)).view(2, 3, 24))
    assert layer(torch.empty(0, 64)).shape == (0, 24)


# --- against float64, with quantised activations


@pytest.mark.parametrize("fused", [False, True], ids=["one_scale", "scale_per_row"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("M", "K"), [*((M, 48) for M in (*range(1, 9), 64)), (3, 16), (3, 448), (3, 1024)]
)
def test_w4a4_against_float64(M, K, dtype, fused):
    """Every element within the error that its own sum allows.

    With p_k the K products (exact in float32: 6 + 6 significant bits) and u = 2**-24, summing in
    any order costs K u sum|p|; making alpha of the two scales, applying it and adding the bias cost
    u each of what they touch. The cast costs half a unit in the last place of the output dtype: a
    relative 2**-8 (bfloat16), 2**-11 (float16), or half its smallest subnormal. 1.01 covers the
    terms of second order.
    """
    torch.manual_seed(K + M)
    parts = [quantize(torch.randn(8, K) * spread) for spread in (1.0, 0.3, 0.01)]
    weight = NVFP4Tensor.fuse(parts) if fused else quantize(torch.randn(24, K))
    bias = torch.randn(24).to(dtype)
    input_scale = global_scale_from_amax(3.0)  # some blocks saturate
    layer = NVFP4Linear(weight, bias, input_scale=input_scale, activations="nvfp4")
    x = torch.randn(M, K).to(dtype)
    y = layer(x)

    values, saturated = reference.quantize_activations(x, input_scale)
    rows = reference.dequantize(weight) * float(input_scale)
    exact = values @ rows.T + bias.double()
    magnitude = values.abs() @ rows.abs().T + bias.double().abs()
    tiny = 2.0**-25 if dtype == torch.float16 else 2.0**-134
    accumulated = (K + 4) * UNIT[torch.float32] * magnitude
    bound = 1.01 * (accumulated + UNIT[dtype] * exact.abs()) + tiny
    assert y.dtype == dtype
    assert ((y.double() - exact).abs() <= bound).all()
    assert int(layer.saturated_blocks) == saturated


@pytest.mark.parametrize("dtype", HALVES)
def test_w4a4_rows_do_not_depend_on_their_neighbours(dtype):
    """Where float32 sums are exact: multiples of 2**-2 below 2**14, so any order is the same.

    Elsewhere the order of summation is that of torch's own matrix product, which promises nothing.
    """
    torch.manual_seed(0)
    K, N = 256, 24
    x = (torch.randint(-12, 13, (8, K)) / 2).clamp(-6, 6)
    x[:, ::16] = 6.0  # so every block of x has scale 1
    weight = nvfp4(torch.randint(0, 16, (N, K)), torch.ones(N, K // 16))
    layer = NVFP4Linear(weight, input_scale=torch.tensor(1.0), activations="nvfp4")
    alone = torch.cat([layer(row[None]) for row in x.to(dtype)])
    for M in range(1, 9):
        assert torch.equal(layer(x[:M].to(dtype)), alone[:M])
        assert torch.equal(layer(x[8 - M :].to(dtype)), alone[8 - M :])
    values, _ = reference.quantize_activations(x, torch.tensor(1.0))
    assert torch.equal(alone, (values @ reference.dequantize(weight).T).to(dtype))


# --- the numbers of known kernel faults


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_k1_ties_go_to_the_even_code_and_large_values_saturate(dtype, sign):
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = torch.zeros(1, 16)
    x[0, :7] = torch.tensor(ties)
    x[0, 15] = 6.0  # the block's scale becomes 1
    layer = NVFP4Linear(identity(16), input_scale=torch.tensor(1.0), activations="nvfp4")
    y = layer((sign * x).to(dtype))[0]
    assert (sign * y[:7]).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert int(layer.saturated_blocks) == 0
    # The block scale ends at 448, so 2**-9 leaves a unit of 0.875: 7 units go to 6.
    limited = NVFP4Linear(identity(16), input_scale=torch.tensor(2.0**-9), activations="nvfp4")
    y = limited((sign * 7 * 0.875 * torch.ones(1, 16)).to(dtype))
    assert (sign * y).tolist() == [[6 * 0.875] * 16]
    assert int(limited.saturated_blocks) == 1


def test_k2_even_columns_are_low_nibbles_and_code_8_is_minus_zero():
    codes = torch.zeros(16, 8, dtype=torch.uint8)
    codes[0, 0], codes[1, 0] = 0x21, 0x80
    weight = NVFP4Tensor(codes, torch.ones(16, 1).to(torch.float8_e4m3fn), torch.tensor(1.0))
    columns = NVFP4Linear(weight)(torch.eye(16)).T  # one-hot x reads out the matrix
    assert columns[0, :2].tolist() == [0.5, 1.0]
    assert columns[1, :2].tolist() == [0.0, 0.0]
    assert weight.dequantize()[1, :2].signbit().tolist() == [False, True]


@pytest.mark.parametrize("options", [{}, W4A4], ids=["W4A16", "W4A4"])
def test_every_byte_is_decoded(options):
    codes = torch.arange(256, dtype=torch.uint8).view(32, 8)
    weight = NVFP4Tensor(codes, torch.ones(32, 1).to(torch.float8_e4m3fn), torch.tensor(1.0))
    options = options and options | {"input_scale": torch.tensor(1.0)}
    y = NVFP4Linear(weight, **options)(6 * torch.eye(16))  # a 6 makes the scale of its block 1
    assert torch.equal(y.T.double(), 6 * reference.dequantize(weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scale", "y"), [(2.0**-7, 0.125), (2.0**-9, 0.03125)])
def test_k3_subnormal_block_scales(scale, y, dtype):
    layer = NVFP4Linear(constant(ONE, 1, 16, [scale]))
    assert layer(torch.ones(1, 16, dtype=dtype)).tolist() == [[y]]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_k4_the_sum_is_scaled_before_it_is_cast(dtype, autocast):
    """4096 * 36 * 256 = 37.7e6 before the scales, far beyond float16."""
    layer = NVFP4Linear(
        constant(SIX, 1, 4096, [16.0] * 256, global_scale=1.0),
        input_scale=torch.tensor(1e-3),
        activations="nvfp4",
    )
    x = torch.full((1, 4096), 6.0 * 16.0 * 1e-3, dtype=dtype)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        y = layer(x)
    assert y.dtype == dtype
    assert float(y) == pytest.approx(37748.736, rel=UNIT[dtype] + 4 * UNIT[torch.float32])


@pytest.mark.parametrize("activations", ["none", "nvfp4"])
@pytest.mark.parametrize(("scales", "y"), [([1.0, 2.0], 48.0), ([1.0, 2.0, 4.0], 112.0)])
def test_k6_every_block_has_its_own_scale(scales, y, activations):
    layer = NVFP4Linear(
        constant(ONE, 1, 16 * len(scales), scales),
        input_scale=torch.tensor(1 / 6),
        activations=activations,
    )
    # x = 1 needs block scale 1 and code 6 under an input scale of 1/6; 6 * fl(1/6) is 1 in float32.
    assert layer(torch.ones(2, 16 * len(scales))).tolist() == [[y], [y]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, W4A4 | {"input_scale": torch.tensor(0.5)}])
def test_k8_zero_blocks_of_x(options, dtype):
    layer = NVFP4Linear(constant(ONE, 3, 64, [1.0] * 4), **options)
    x = torch.full((2, 64), 3.0, dtype=dtype)
    x[0, 16:32] = 0.0
    x[1] = 0.0
    assert layer(x).tolist() == [[144.0] * 3, [0.0] * 3]


def test_a2_fused_layers_keep_their_own_scales():
    gate = constant(ONE, 4, 32, [1.0, 2.0], global_scale=3.85e-5)
    up = constant(ONE, 4, 32, [1.0, 2.0], global_scale=4.83e-5)
    fused = NVFP4Tensor.fuse([gate, up])
    for options in ({}, W4A4):
        y = NVFP4Linear(fused, **options)(torch.ones(1, 32))[0]
        assert float(y[4] / y[0]) == pytest.approx(1.2545, abs=1e-4)


def test_a5_weights_of_one_without_activation_scale_give_the_sum():
    x = torch.arange(64.0)[None]
    assert float(NVFP4Linear(constant(ONE, 1, 64, [1.0] * 4))(x)) == float(x.sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M", [1, 8, 64])
@pytest.mark.parametrize("options", [{}, W4A4], ids=["W4A16", "W4A4"])
def test_a11_a_zero_input_gives_the_bias(options, M, dtype):
    bias = torch.arange(1.0, 25.0).to(dtype)
    layer = NVFP4Linear(quantize(torch.randn(24, 64)), bias, **options)
    assert torch.equal(layer(torch.zeros(M, 64, dtype=dtype)), bias.expand(M, 24))


# --- saturation


def test_q6_saturation_is_counted_and_reported(caplog):
    x = torch.tensor([40.0, -31.0, 23.0, -11.0]).repeat_interleave(16)[None]
    options = {"activations": "nvfp4", "name": "model.layers.3.mlp.down_proj"}
    layer = NVFP4Linear(identity(64), input_scale=global_scale_from_amax(10.0), **options)
    assert layer.check_saturation() == 0
    assert caplog.records == []
    layer(x)
    layer(x)
    _, per_call = reference.quantize_activations(x, layer.input_scale)
    assert layer.check_saturation() == 2 * per_call > 0
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("model.layers.3.mlp.down_proj: ")

    roomy = NVFP4Linear(
        identity(64), input_scale=global_scale_from_amax(10.0, headroom=4.0), **options
    )
    # Every element is its block's maximum, so the error is that of an E4M3 scale: 2**-4 at most.
    assert ((roomy(x) - x).abs() < 0.07 * x.abs()).all()
    assert roomy.check_saturation() == 0
