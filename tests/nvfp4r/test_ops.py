"""torch.ops.nvfp4r on a CPU: reference semantics, fake kernels, refusals (GPU: test_gpu_linear)."""

import pytest
import torch

from nvfp4r import quantize
from nvfp4r.format import NVFP4Tensor
from nvfp4r.ops import gemm, gemv, linear
from nvfp4r.packed import pack
from nvfp4r.quantize import quantize_activations
from nvfp4r.reference import dequantize

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def example(order: str, M: int = 3, N: int = 40, K: int = 144):
    generator = torch.Generator().manual_seed(0)
    weight = quantize(torch.randn(N, K, generator=generator))
    x = torch.randn(M, K, generator=generator).to(DTYPES[order])
    bias = torch.randn(N, generator=generator).to(DTYPES[order])
    packed = pack(weight, order)
    return weight, x, bias, (packed.tiles, packed.alpha), (N, K, order)


def assert_close(y, x, weight, bias):
    """float32 sums of K exact products, then one rounding to y's dtype."""
    truth = x.double() @ dequantize(weight).T + bias.double()
    magnitude = x.double().abs() @ dequantize(weight).abs().T + bias.double().abs()
    rounding = torch.finfo(y.dtype).eps / 2
    limit = rounding * truth.abs() + x.shape[-1] * 2**-24 * magnitude
    assert bool(((y.double() - truth).abs() <= limit).all())


@pytest.mark.parametrize("order", DTYPES)
@pytest.mark.parametrize("M", [1, 64, 65])
def test_linear_and_gemv_compute_the_reference(order, M):
    weight, x, bias, stored, sizes = example(order, M)
    y = linear(x, *stored, bias, None, *sizes)
    assert y.dtype == x.dtype
    assert_close(y, x, weight, bias)
    assert torch.equal(gemm(x, *stored, bias, None, *sizes), y)
    if M <= 64:
        assert torch.equal(gemv(x, *stored, bias, None, *sizes), y)


@pytest.mark.parametrize("order", DTYPES)
@pytest.mark.parametrize(("code", "scale"), [(0x77, 0x7E), (0x77, 0x01), (0x11, 0x01), (0, 0)])
def test_k3_k8_the_ends_of_the_format(code, scale, order):
    """6 under 448, 6 and 0.5 under 2^-9, and zero blocks."""
    codes = torch.full((40, 72), code, dtype=torch.uint8)
    scales = torch.full((40, 9), scale, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = NVFP4Tensor(codes, scales, torch.tensor(0.25))  # no result is subnormal in float16
    packed = pack(weight, order)
    x = torch.randn(3, 144, generator=torch.Generator().manual_seed(0)).to(DTYPES[order])
    y = linear(x, packed.tiles, packed.alpha, None, None, 40, 144, order)
    assert_close(y, x, weight, torch.zeros(40))
    assert bool(y.any()) == bool(code)


def test_leading_dimensions_and_no_tokens():
    _, x, bias, stored, sizes = example("bf16", 6)
    flat = linear(x, *stored, bias, None, *sizes)
    shaped = linear(x.view(2, 3, -1), *stored, bias, None, *sizes)
    assert torch.equal(shaped.view(6, -1), flat)
    assert linear(x[:0], *stored, bias, None, *sizes).shape == (0, 40)


def test_w4a4_quantises_first():
    weight, x, bias, stored, sizes = example("bf16")
    scale = (x.float().abs().max() / 2688).float()
    values, _ = quantize_activations(x, scale)
    scaled = NVFP4Tensor(weight.codes, weight.block_scale, weight.global_scale * scale)
    y = linear(x, *stored, bias, scale, *sizes)
    assert_close(y, values.bfloat16(), scaled, bias)


def test_a11_bias_alone():
    _, x, _, stored, sizes = example("bf16", 64)
    bias = torch.arange(1, 41).bfloat16()
    y = linear(torch.zeros_like(x), *stored, bias, None, *sizes)
    assert torch.equal(y, bias.expand(64, -1))


def test_the_op_survives_opcheck():
    """Schema, fake kernel and autograd registration, by torch's own checker."""
    _, x, bias, stored, sizes = example("bf16")
    arguments = (x, *stored, bias, None, *sizes)
    torch.library.opcheck(torch.ops.nvfp4r.linear.default, arguments)
    torch.library.opcheck(torch.ops.nvfp4r.gemv.default, arguments)
    torch.library.opcheck(torch.ops.nvfp4r.gemm.default, arguments)
    torch.library.opcheck(torch.ops.nvfp4r.quantize.default, (x, torch.tensor(0.01)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": lambda v: v.half()}, TypeError, r"x has dtype torch.float16.*other order"),
        ({"x": lambda v: v[:, :128]}, ValueError, r"\[\.\.\., 144\] is needed"),
        ({"tiles": lambda v: v[:2]}, ValueError, r"tiles is \[2, 2, 1152\]"),
        ({"tiles": lambda v: v.to(torch.int8)}, ValueError, "tiles is .* torch.uint8 is needed"),
        ({"tiles": lambda v: v.transpose(0, 1).contiguous().transpose(0, 1)}, ValueError, "contig"),
        ({"alpha": lambda v: v[:3]}, ValueError, r"alpha is \[3\]"),
        ({"bias": lambda v: v.float()}, ValueError, "bias is .* torch.bfloat16 is needed"),
    ],
)
def test_bad_tensors_are_named_before_anything_runs(change, error, message):
    _, x, bias, (tiles, alpha), sizes = example("bf16")
    tensors = {"x": x, "tiles": tiles, "alpha": alpha, "bias": bias}
    for name, function in change.items():
        tensors[name] = function(tensors[name])
    with pytest.raises(error, match=message):
        linear(*tensors.values(), None, *sizes)


def test_gemv_refuses_many_tokens_and_unknown_orders():
    _, x, bias, stored, sizes = example("bf16", 65)
    with pytest.raises(ValueError, match="65 tokens; 1 to 64"):
        gemv(x, *stored, bias, None, *sizes)
    with pytest.raises(ValueError, match="order is 'f32'"):
        linear(x, *stored, bias, None, 40, 144, "f32")


def test_a_misaligned_weight_is_refused():
    _, x, bias, (tiles, alpha), sizes = example("bf16")
    storage = torch.zeros(tiles.numel() + 1, dtype=torch.uint8)
    shifted = storage[1:].view(tiles.shape)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        linear(x, shifted, alpha, bias, None, *sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantize_keeps_the_dtype_and_the_values(dtype):
    x = (8 * torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(0))).to(dtype)
    scale = torch.tensor(1e-3)
    values, saturated = torch.ops.nvfp4r.quantize(x, scale)
    expected, expected_saturated = quantize_activations(x, scale)
    assert values.dtype == dtype
    assert torch.equal(values.float(), expected)
    assert int(saturated) == int(expected_saturated) > 0


def test_quantize_names_a_bad_scale():
    with pytest.raises(ValueError, match=r"input_scale is 0\.0"):
        torch.ops.nvfp4r.quantize(torch.ones(1, 16), torch.tensor(0.0))
