"""Packed NVFP4Linear on a CPU: arithmetic against float64, and everything around it."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from nvfp4r import reference
from nvfp4r.format import NVFP4Tensor
from nvfp4r.linear import NVFP4Linear
from nvfp4r.packed import pack
from nvfp4r.quantize import global_scale_from_amax, quantize
from tests.nvfp4r.packed_truth import assert_linear

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
W4A4 = {"input_scale": torch.tensor(0.002), "activations": "nvfp4"}
both_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
both_activations = pytest.mark.parametrize("options", [{}, W4A4], ids=["W4A16", "W4A4"])


def packed_layer(weight, bias=None, *, dtype=torch.bfloat16, **options):
    layer = NVFP4Linear(weight, bias, **options)
    layer.pack_(dtype)
    return layer


def random_layer(N=24, K=64, *, seed=0, dtype=torch.bfloat16, **options):
    torch.manual_seed(seed)
    return packed_layer(quantize(torch.randn(N, K)), torch.randn(N), dtype=dtype, **options)


def raw(layer):
    """Bytes of everything that the layer stores, by name."""
    return {
        name: bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
        for name, tensor in (*layer.named_buffers(), *layer.named_parameters())
    }


# --- arithmetic


@pytest.mark.parametrize("fused", [False, True], ids=["one_scale", "scale_per_row"])
@both_dtypes
@pytest.mark.parametrize("activations", ["none", "nvfp4"])
@pytest.mark.parametrize(("M", "K"), [(1, 16), (3, 48), (8, 144), (64, 64), (2, 1024)])
def test_against_float64(M, K, activations, dtype, fused):
    torch.manual_seed(K + M)
    parts = [quantize(torch.randn(8, K) * spread) for spread in (1.0, 0.3, 0.01)]
    weight = NVFP4Tensor.fuse(parts) if fused else quantize(torch.randn(24, K))
    scale = global_scale_from_amax(3.0)  # some blocks saturate
    options = {"input_scale": scale, "activations": activations}
    x = torch.randn(M, K).to(dtype)
    saturated = reference.quantize_activations(x, scale)[1] if activations == "nvfp4" else 0
    for bias in (None, torch.randn(24).to(dtype), torch.randn(24)):
        layer = packed_layer(weight, bias, dtype=dtype, **options)
        assert_linear(layer(x), x, weight, bias, scale if activations == "nvfp4" else None)
        assert int(layer.saturated_blocks) == saturated


@both_activations
def test_leading_dimensions(options):
    layer = random_layer(**options)
    x = torch.randn(2, 3, 64).bfloat16()
    assert torch.equal(layer(x), layer(x.reshape(6, 64)).view(2, 3, 24))
    assert layer(x[0, 0]).shape == (24,)
    assert layer(torch.empty(0, 64).bfloat16()).shape == (0, 24)


@both_dtypes
@both_activations
def test_without_roundings_packed_and_unpacked_are_the_same(options, dtype):
    """Weights of 6 bits and scales of 1: every product and sum is exact in every format on the way.

    Multiples of 2**-3 below 64 * 36 = 2304 have 15 bits; float32 sums hold them.
    """
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (40, 32), dtype=torch.uint8)
    ones = torch.full((40, 4), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    options = options and options | {"input_scale": torch.tensor(1.0)}
    layer = NVFP4Linear(NVFP4Tensor(codes, ones, torch.tensor(1.0)), **options)
    x = (torch.randint(-12, 13, (5, 64)) / 2).to(dtype)
    expected = layer(x)
    layer.pack_(dtype)
    assert torch.equal(layer(x), expected)


@both_activations
def test_k4_the_sum_is_scaled_before_it_is_cast(options):
    """4096 * 36 * 256 = 37.7e6 before the scales, far beyond float16."""
    codes = torch.full((1, 2048), 0x77, dtype=torch.uint8)
    sixteens = torch.full((1, 256), 0x58, dtype=torch.uint8).view(torch.float8_e4m3fn)
    if options:
        weight, scale = NVFP4Tensor(codes, sixteens, torch.tensor(1.0)), torch.tensor(1e-3)
        options = options | {"input_scale": scale}
        x = torch.full((1, 4096), 6.0 * 16.0 * 1e-3).half()
    else:
        weight, scale = NVFP4Tensor(codes, sixteens, torch.tensor(1e-3)), None
        x = torch.full((1, 4096), 96.0).half()
    with torch.autocast("cpu", dtype=torch.float16):
        y = packed_layer(weight, dtype=torch.float16, **options)(x)
    assert_linear(y, x, weight, input_scale=scale)
    assert float(y) == pytest.approx(37748.736, rel=2.0**-11 + 2.0**-20)


@both_dtypes
@both_activations
def test_a2_fused_layers_keep_their_own_scales(options, dtype):
    torch.manual_seed(0)
    base = quantize(torch.randn(4, 32).abs())
    gate = NVFP4Tensor(base.codes, base.block_scale, torch.tensor(3.85e-5))
    up = NVFP4Tensor(base.codes, base.block_scale, torch.tensor(4.83e-5))
    layer = packed_layer(NVFP4Tensor.fuse([gate, up]), dtype=dtype, **options)
    y = layer(torch.ones(1, 32, dtype=dtype)).double()[0]
    two_roundings = 2 * 1.01 * torch.finfo(dtype).eps / 2
    assert ((y[4:] / y[:4]) / (4.83 / 3.85) - 1).abs().max() <= two_roundings


@pytest.mark.parametrize("M", [1, 8, 64])
@both_activations
def test_a11_a_zero_input_gives_the_bias(options, M):
    bias = torch.arange(1.0, 25.0)
    layer = packed_layer(quantize(torch.randn(24, 64)), bias, **options)
    y = layer(torch.zeros(M, 64).bfloat16())
    assert torch.equal(y, bias.bfloat16().expand(M, 24))


@both_activations
def test_torch_compile_sees_one_graph(options):
    layer = random_layer(**options)
    x = 8 * torch.randn(3, 64).bfloat16()
    expected = layer(x)
    saturated = int(layer.saturated_blocks)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    assert int(layer.saturated_blocks) == 2 * saturated
    assert (saturated > 0) == bool(options)


# --- packing and what it leaves


@both_dtypes
@pytest.mark.parametrize("fused", [False, True], ids=["one_scale", "scale_per_row"])
def test_the_weight_comes_back_bit_for_bit(fused, dtype):
    parts = [quantize(torch.randn(20, 48) * spread) for spread in (1.0, 0.3)]
    weight = NVFP4Tensor.fuse(parts) if fused else parts[0]
    before = copy.deepcopy(weight)
    got = packed_layer(weight, dtype=dtype).weight
    for field in ("codes", "block_scale", "global_scale"):
        one, other = getattr(got, field), getattr(before, field)
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        assert one.shape == other.shape


@both_activations
def test_packing_leaves_one_copy(options):
    torch.manual_seed(0)
    weight = quantize(torch.randn(40, 144))
    layer = NVFP4Linear(weight, **options)
    layer(torch.randn(2, 144).bfloat16())
    assert layer.packed_dtype is None
    assert layer._matrix is not None
    layer.pack_(torch.bfloat16)
    layer(torch.randn(2, 144).bfloat16())
    assert layer.packed_dtype is torch.bfloat16
    assert layer._matrix is None
    scale = {"input_scale"} if options else set()
    assert {n for n, _ in layer.named_buffers()} == {"tiles", "alpha", "saturated_blocks"} | scale
    assert set(layer.state_dict()) == {"tiles", "alpha"} | scale
    expected = pack(weight, "bf16")
    assert torch.equal(layer.tiles, expected.tiles)
    assert torch.equal(layer.alpha, expected.alpha)


def test_repr_says_packed():
    assert repr(random_layer(**W4A4)) == (
        "NVFP4Linear(in_features=64, out_features=24, bias=True, "
        "weight=NVFP4 packed for torch.bfloat16, activations=nvfp4)"
    )


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16, nn.Module.double])
@both_activations
def test_casting_a_module_touches_the_bias_alone(options, cast):
    model = nn.Sequential(random_layer(**options))
    before = copy.deepcopy(model[0])
    cast(model)
    assert model[0].bias.dtype == cast(nn.Linear(1, 1)).bias.dtype
    after, stored = raw(model[0]), raw(before)
    assert {n: after[n] for n in after if n != "bias"} == {
        n: stored[n] for n in stored if n != "bias"
    }
    x = torch.randn(3, 64).bfloat16()
    before.bias = model[0].bias
    assert torch.equal(model(x), before(x))


def test_moving_keeps_it_packed():
    layer = random_layer()
    layer.to("meta")
    assert layer.packed_dtype is torch.bfloat16
    kinds = {name: (b.device.type, b.dtype) for name, b in layer.named_buffers()}
    assert kinds == {
        "tiles": ("meta", torch.uint8),
        "alpha": ("meta", torch.float32),
        "saturated_blocks": ("meta", torch.int64),
    }
    y = layer(torch.empty(2, 64, device="meta", dtype=torch.bfloat16))
    assert (y.shape, y.dtype) == ((2, 24), torch.bfloat16)


# --- loading anew


@pytest.mark.parametrize("how", ["load_", "load_state_dict"])
@both_dtypes
@both_activations
def test_a12_a_second_load_leaves_nothing_of_the_first(options, dtype, how):
    x = 8 * torch.randn(4, 64).to(dtype)
    old = random_layer(seed=1, dtype=dtype, **options)
    first = old(x)
    assert bool(old.saturated_blocks) == bool(options)
    weight = quantize(torch.randn(24, 64))
    doubled = NVFP4Tensor(weight.codes, weight.block_scale, 2 * weight.global_scale)
    scale = options and {**options, "input_scale": torch.tensor(0.004)}
    bias = torch.randn(24)
    new = packed_layer(doubled, bias, dtype=dtype, **scale)
    addresses = {n: t.data_ptr() for n, t in (*old.named_buffers(), *old.named_parameters())}
    if how == "load_":
        old.load_(doubled, bias, scale.get("input_scale"))
        assert int(old.saturated_blocks) == 0
    else:
        old.load_state_dict(new.state_dict())
    assert torch.equal(old(x), new(x))
    assert not torch.equal(old(x), first)
    # In place: a captured graph reads from these addresses.
    assert addresses == {
        n: t.data_ptr() for n, t in (*old.named_buffers(), *old.named_parameters())
    }


def test_a_packed_layer_takes_one_global_scale_per_row():
    layer = random_layer(N=32, K=16)
    fused = NVFP4Tensor.fuse([quantize(torch.randn(16, 16) * spread) for spread in (1.0, 0.01)])
    layer.load_(fused, torch.zeros(32))
    x = torch.randn(3, 16).bfloat16()
    assert_linear(layer(x), x, fused)


@both_dtypes
@both_activations
def test_a_state_dict_goes_through_a_file(options, dtype):
    model = nn.Sequential(random_layer(seed=1, dtype=dtype, **options))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = nn.Sequential(random_layer(seed=2, dtype=dtype, **options))
    other.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(3, 64).to(dtype)
    assert torch.equal(other(x), model(x))
    assert raw(other[0].to("cpu"))["tiles"] == raw(model[0])["tiles"]


def unpacked(N=24, K=64):
    return NVFP4Linear(quantize(torch.ones(N, K)), torch.ones(N), name="up")


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        # tiles of one shape each, which would be read as other numbers
        (
            lambda: random_layer(dtype=torch.float16),
            lambda: random_layer(name="up"),
            r"up: .* \[24, 64\] packed for torch.float16, need .* packed for torch.bfloat16",
        ),
        (
            lambda: random_layer(K=48),
            lambda: random_layer(name="up"),
            r"up: .*\[24, 48\] packed .* need .* \[24, 64\] packed",
        ),
        (random_layer, unpacked, r"up: .*\[24, 64\] packed .* need .* not packed; pack_"),
        (unpacked, lambda: random_layer(name="up"), r"up: .* not packed, need .* packed for"),
    ],
    ids=["order", "padding", "packed", "unpacked"],
)
def test_states_that_do_not_belong_are_refused(source, target, message):
    layer = target()
    before = raw(layer)
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(source().state_dict())
    assert raw(layer) == before


GOOD = quantize(torch.ones(24, 64))
NAN_SCALE = NVFP4Tensor(
    GOOD.codes, torch.full((24, 4), torch.nan).to(torch.float8_e4m3fn), GOOD.global_scale
)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((GOOD,), ValueError, "got none as new bias, but the layer has one"),
        ((GOOD, torch.ones(23)), ValueError, r"bias has shape \[23\], need \[24\]"),
        ((GOOD, torch.ones(24, dtype=torch.int32)), TypeError, "bias has dtype torch.int32"),
        ((NAN_SCALE, torch.ones(24)), ValueError, "NaN"),
        ((quantize(torch.ones(24, 48)), torch.ones(24)), ValueError, r"\[24, 48\], need \[24, 64"),
    ],
)
def test_loads_that_are_refused_change_nothing(arguments, error, message):
    layer = random_layer(name="mlp.up_proj")
    before = raw(layer)
    with pytest.raises(error, match=f"mlp.up_proj.*{message}"):
        layer.load_(*arguments)
    assert raw(layer) == before


# --- refusals


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.float8_e4m3fn])
def test_dtypes_that_cannot_be_packed_for(dtype):
    layer = unpacked()
    with pytest.raises(TypeError, match=rf"^up: got {dtype} to pack for, need one of"):
        layer.pack_(dtype)
    assert layer.packed_dtype is None


@both_dtypes
def test_packing_twice(dtype):
    layer = random_layer(name="up")
    before = raw(layer)
    with pytest.raises(TypeError, match=r"^up: is packed for torch.bfloat16 already, need one"):
        layer.pack_(dtype)
    assert raw(layer) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@both_activations
def test_activations_of_another_dtype(options, dtype):
    layer = random_layer(name="up", **options)
    with pytest.raises(TypeError, match=f"^up: x has dtype {dtype}, need torch.bfloat16, which"):
        layer(torch.ones(2, 64, dtype=dtype))
    assert int(layer.saturated_blocks) == 0


def test_an_input_of_another_size():
    with pytest.raises(ValueError, match=r"up: x has shape \[2, 32\], need \[\.\.\., 64\]"):
        random_layer(name="up")(torch.ones(2, 32).bfloat16())
