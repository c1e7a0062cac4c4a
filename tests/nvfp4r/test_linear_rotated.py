"""NVFP4Linear with rotated inputs, packed and not, against float64; and what keeps it apart."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from nvfp4r import reference
from nvfp4r.format import NVFP4Tensor
from nvfp4r.linear import NVFP4Linear
from nvfp4r.ops import gemm, gemv, linear, rotated
from nvfp4r.ops import quantize as quantize_op
from nvfp4r.packed import pack
from nvfp4r.quantize import global_scale_from_amax, quantize
from tests.nvfp4r.rotated_truth import assert_rotated, grid, rotated_values, turn

ROTATION = "hadamard16"
HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}
SCALE = global_scale_from_amax(6.0)  # some blocks saturate
W4A4 = {"input_scale": SCALE, "activations": "nvfp4"}
both_dtypes = pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
both_activations = pytest.mark.parametrize("options", [{}, W4A4], ids=["W4A16", "W4A4"])


def random_layer(N=24, K=64, *, seed=0, rotation=ROTATION, **options):
    torch.manual_seed(seed)
    weight, bias = quantize(torch.randn(N, K)), torch.randn(N).bfloat16().float()
    return NVFP4Linear(weight, bias, rotation=rotation, **options)


# --- arithmetic


@pytest.mark.parametrize("dtype", [*HALVES.values(), torch.float32])
@pytest.mark.parametrize("fused", [False, True], ids=["one_scale", "scale_per_row"])
@pytest.mark.parametrize(("M", "K"), [(1, 16), (3, 48), (8, 1024), (64, 64)])
def test_w4a4_against_float64(M, K, fused, dtype):
    torch.manual_seed(K + M)
    parts = [quantize(torch.randn(8, K) * spread) for spread in (1.0, 0.01)]
    weight = NVFP4Tensor.fuse(parts) if fused else quantize(torch.randn(16, K))
    bias, x = torch.randn(16).to(dtype), grid(M, K, dtype=dtype, seed=M)
    _, saturated = rotated_values(x, SCALE)
    for packed in (False, True) if dtype in HALVES.values() else (False,):
        layer = NVFP4Linear(weight, bias, rotation=ROTATION, **W4A4)
        if packed:
            layer.pack_(dtype)
        assert_rotated(layer(x), x, weight, bias, SCALE)
        assert int(layer.saturated_blocks) == saturated


def test_w4a4_does_not_round_to_16_bits_on_the_way():
    """On these inputs it would be seen: the codes would be others."""
    x = grid(64, 64, dtype=torch.bfloat16)
    exact, _ = reference.quantize_activations(turn(x), SCALE)
    rounded, _ = reference.quantize_activations(turn(x).bfloat16(), SCALE)
    assert not torch.equal(exact, rounded)
    values, _ = quantize_op(x, SCALE, ROTATION)
    assert values.dtype == torch.bfloat16
    assert torch.equal(values.double(), exact)


@pytest.mark.parametrize("dtype", [*HALVES.values(), torch.float32])
@pytest.mark.parametrize("keep", [True, False])
def test_w4a16_unpacked_is_torchs_linear_on_inputs_rounded_once(dtype, keep):
    layer = random_layer(keep_dequantized=keep)
    x = grid(5, 64, dtype=dtype)
    values = rotated_values(x, None)[0].to(dtype)
    expected = F.linear(values, layer.weight.dequantize(dtype), layer.bias.to(dtype))
    for _ in range(2):
        assert torch.equal(layer(x), expected)


@both_dtypes
@pytest.mark.parametrize(("M", "K"), [(1, 16), (3, 48), (8, 1024), (70, 64)])
def test_w4a16_packed_against_float64(M, K, dtype):
    layer = random_layer(K=K, seed=K)
    x, weight = grid(M, K, dtype=dtype, seed=M), copy.deepcopy(layer.weight)
    layer.pack_(dtype)
    assert_rotated(layer(x), x, weight, layer.bias)


def test_it_computes_what_the_weight_was_before_it_was_rotated():
    """For a weight that NVFP4 holds exactly once it is rotated; x is any, in float32.

    Rotating costs 4 roundings of sums below s = sum|x| of the block, / 4 in the end; then float32
    sums as ever. u = 2**-24.
    """
    torch.manual_seed(0)
    stored = quantize(torch.randn(32, 96))
    original = turn(reference.dequantize(stored))  # its own inverse
    x = torch.randn(7, 96)
    sums = x.double().abs().unflatten(-1, (-1, 16)).sum(-1) / 4
    spread = sums.repeat_interleave(16, -1)  # a bound of the rotated values, too
    rows = reference.dequantize(stored).abs()
    bound = 1.01 * (4 + 96 + 4) * 2.0**-24 * (spread @ rows.T)
    y = NVFP4Linear(stored, rotation=ROTATION)(x)
    assert ((y.double() - x.double() @ original.T).abs() <= bound).all()
    plain = NVFP4Linear(stored)(x)
    assert not ((plain.double() - x.double() @ original.T).abs() <= bound).any()


@both_activations
@pytest.mark.parametrize("packed", [False, True])
def test_autocast_does_not_reach_the_rotation(options, packed):
    layer = random_layer(**options)
    if packed:
        layer.pack_(torch.bfloat16)
    x = grid(4, 64, dtype=torch.bfloat16)
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), expected)


@both_activations
@pytest.mark.parametrize("packed", [False, True])
def test_leading_dimensions_and_no_tokens(options, packed):
    layer = random_layer(**options)
    if packed:
        layer.pack_(torch.bfloat16)
    x = grid(2, 3, 64, dtype=torch.bfloat16)
    assert torch.equal(layer(x), layer(x.view(6, 64)).view(2, 3, 24))
    assert layer(x[0, 0]).shape == (24,)
    assert layer(x[:0]).shape == (0, 3, 24)


def test_gradients_flow_through_the_rotation():
    layer = NVFP4Linear(quantize(torch.eye(16)), rotation=ROTATION)
    x = torch.randn(2, 16, requires_grad=True)
    layer(x).sum().backward()
    assert torch.allclose(x.grad, turn(torch.ones(2, 16)).float())


# --- the ops


@both_dtypes
@pytest.mark.parametrize("M", [1, 64, 70])
@pytest.mark.parametrize("scale", [None, SCALE], ids=["W4A16", "W4A4"])
def test_the_ops_rotate(M, scale, dtype):
    torch.manual_seed(0)
    weight, bias = quantize(torch.randn(40, 144)), torch.randn(40).to(dtype)
    packed = pack(weight, "bf16" if dtype == torch.bfloat16 else "f16")
    x = grid(M, 144, dtype=dtype)
    arguments = (x, packed.tiles, packed.alpha, bias, scale, 40, 144, packed.order, ROTATION)
    y = linear(*arguments)
    assert_rotated(y, x, weight, bias, scale)
    assert torch.equal(gemm(*arguments), y)
    if M <= 64:
        assert torch.equal(gemv(*arguments), y)


def test_the_ops_survive_opcheck_and_refuse_other_rotations():
    packed = pack(quantize(torch.randn(16, 32)), "bf16")
    x = grid(3, 32, dtype=torch.bfloat16)
    arguments = (x, packed.tiles, packed.alpha, None, SCALE, 16, 32, "bf16")
    torch.library.opcheck(torch.ops.nvfp4r.linear.default, (*arguments, ROTATION))
    torch.library.opcheck(torch.ops.nvfp4r.quantize.default, (x, SCALE, ROTATION))
    message = r"rotation is 'hadamard32', need one of \('hadamard16',\) or None"
    for refused in (
        lambda: linear(*arguments, "hadamard32"),
        lambda: quantize_op(x, SCALE, "hadamard32"),
        lambda: rotated(x, "hadamard32"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()


@both_activations
def test_torch_compile_sees_one_graph(options):
    layer = random_layer(**options)
    layer.pack_(torch.bfloat16)
    x = grid(3, 64, dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


# --- states, loads, names


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("metadata", [True, False], ids=["metadata", "no_metadata"])
@pytest.mark.parametrize("into", [None, ROTATION], ids=["into_plain", "into_rotated"])
def test_no_state_goes_between_rotated_and_other_layers(into, metadata, packed):
    source = random_layer(rotation=None if into else ROTATION)
    target = random_layer(seed=1, rotation=into)
    for layer in (source, target) if packed else ():
        layer.pack_(torch.bfloat16)
    x = grid(2, 64, dtype=torch.bfloat16)
    before = target(x)
    state = source.state_dict()
    if not metadata:  # as after a file format that keeps tensors alone
        state = dict(state)
    message = "rotated by hadamard16" if metadata else "rotated_columns"
    with pytest.raises(RuntimeError, match=message):
        target.load_state_dict(state)
    if metadata:
        assert torch.equal(target(x), before)
        with pytest.raises(RuntimeError, match=message):
            target.load_state_dict(state, strict=False)


@pytest.mark.parametrize("packed", [False, True])
@both_activations
def test_a_state_of_a_rotated_layer_goes_into_another(options, packed):
    source, target = random_layer(**options), random_layer(seed=1, **options)
    for layer in (source, target) if packed else ():
        layer.pack_(torch.bfloat16)
    x = grid(2, 64, dtype=torch.bfloat16)
    target(x)
    target.load_state_dict(source.state_dict())
    assert torch.equal(target(x), source(x))
    assert source.state_dict()["rotated_columns"] == 16


@pytest.mark.parametrize("rotation", [None, ROTATION])
@pytest.mark.parametrize("packed", [False, True])
def test_load_has_to_be_told_of_the_rotation(packed, rotation):
    layer, other = random_layer(rotation=rotation), random_layer(seed=1, rotation=rotation)
    x = grid(2, 64, dtype=torch.bfloat16)
    weight = other.weight
    for each in (layer, other) if packed else ():
        each.pack_(torch.bfloat16)
    before = layer(x)
    wrong = None if rotation else ROTATION
    with pytest.raises(ValueError, match=rf"new weight has rotation {wrong!r}.*{rotation!r}"):
        layer.load_(weight, other.bias, rotation=wrong)
    assert torch.equal(layer(x), before)
    layer.load_(weight, other.bias, rotation=rotation)
    assert torch.equal(layer(x), other(x))


def test_packing_and_casting_keep_the_rotation():
    layer = random_layer()
    weight = copy.deepcopy(layer.weight)
    layer.pack_(torch.float16)
    layer.half()
    assert layer.rotation == ROTATION
    assert layer.rotated_columns.dtype == torch.uint8
    x = grid(3, 64, dtype=torch.float16)
    assert_rotated(copy.deepcopy(layer)(x), x, weight, layer.bias)


def test_repr_says_rotated():
    assert repr(random_layer()).endswith("keep_dequantized=True, rotation=hadamard16)")
    assert "rotation" not in repr(random_layer(rotation=None))
    assert "rotated_columns" not in random_layer(rotation=None).state_dict()


def test_unknown_rotations_are_refused():
    with pytest.raises(ValueError, match=r"up: rotation is 'hadamard32', need one of"):
        NVFP4Linear(quantize(torch.ones(16, 16)), name="up", rotation="hadamard32")
    with pytest.raises(ValueError, match=r"rotation is 'hadamard32', need one of"):
        random_layer().load_(quantize(torch.ones(24, 64)), rotation="hadamard32")
