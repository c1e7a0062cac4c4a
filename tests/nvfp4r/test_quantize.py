"""The weight quantiser against the reference, bit by bit, and what it refuses.

Global scales and activations have files of their own (test_global_scale.py, test_activations.py).
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4r import reference
from nvfp4r.format import unpack_codes
from nvfp4r.quantize import quantize

ONE = torch.tensor(1.0)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MIDPOINTS = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
TIES_BECOME = [0, 2, 2, 4, 4, 6, 6]  # codes, the even neighbour


def assert_matches_reference(weight, tensor):
    codes, scale_bytes, _ = reference.quantize(weight, tensor.global_scale)
    assert torch.equal(tensor.block_scale.view(torch.uint8), scale_bytes)
    assert torch.equal(unpack_codes(tensor.codes), codes)


def test_k1_midpoints_go_to_the_even_code():
    magnitudes = [*MIDPOINTS, 6.1]  # 6.1/6 rounds to a block scale of 1
    weight = torch.tensor([magnitudes + [-m for m in magnitudes]])
    tensor = quantize(weight, global_scale=ONE)
    assert tensor.block_scale.float().item() == 1.0
    codes = [*TIES_BECOME, 7]
    assert unpack_codes(tensor.codes)[0].tolist() == codes + [code + 8 for code in codes]
    values = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert tensor.dequantize()[0].tolist() == values + [-v for v in values]


@pytest.mark.parametrize("exponent", [-100, -3, 0, 40])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_e2m1_tie_under_every_block_scale(sign, exponent):
    """Row b: scale byte b; each midpoint with its float32 neighbours below and above."""
    steps = torch.tensor([reference.e4m3(b) for b in range(1, 127)]).mul(2.0**exponent).view(-1, 1)
    ties = steps * torch.tensor(MIDPOINTS)  # 7 significant bits, exact
    below, above = torch.nextafter(ties, ties - ties), torch.nextafter(ties, ties + 1e38)
    full = 6 * steps  # fixes the block scale
    rows = torch.cat([full, below, full * 0, full, ties, full * 0, full, above, full * 0], dim=1)
    weight = sign * torch.nn.functional.pad(rows.view(-1, 3, 9), (0, 7)).flatten(1)

    tensor = quantize(weight, global_scale=torch.tensor(2.0**exponent))
    bytes_expected = torch.arange(1, 127, dtype=torch.uint8).view(-1, 1).expand(-1, 3)
    assert torch.equal(tensor.block_scale.view(torch.uint8), bytes_expected)
    codes = unpack_codes(tensor.codes).view(-1, 3, 16)[:, :, 1:8].long()
    negative = 8 if sign < 0 else 0
    for place, expected in enumerate((list(range(7)), TIES_BECOME, list(range(1, 8)))):
        wanted = torch.tensor(expected) + negative
        assert torch.equal(codes[:, place], wanted.expand(126, 7))
    assert_matches_reference(weight, tensor)


@pytest.mark.parametrize("global_scale", [1.0, 2.0**-30])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_e4m3_tie(sign, global_scale):
    values = torch.tensor([reference.e4m3(b) for b in range(127)], dtype=torch.float64)
    midpoints = (values[:-1] + values[1:]) / 2
    amax = (6 * global_scale * midpoints).float()  # 7 significant bits, exact
    below, above = torch.nextafter(amax, amax - amax), torch.nextafter(amax, amax + 1)
    weight = torch.zeros(126, 48)
    weight[:, 3], weight[:, 16], weight[:, 47] = sign * below, sign * amax, sign * above

    lower = torch.arange(126)
    expected = torch.stack((lower, lower + lower % 2, lower + 1), dim=1)
    expected = expected.clamp(min=1)  # clamped to 2^-9 before rounding
    tensor = quantize(weight, global_scale=torch.tensor(global_scale))
    assert torch.equal(tensor.block_scale.view(torch.uint8).long(), expected)
    assert_matches_reference(weight, tensor)


def rough_weights(dtype, magnitude, seed):
    """[64, 128] gaussian, with outliers, small rows, zero blocks and rows, and signed zeros."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)) * magnitude
    weight[3, 5] *= 60
    weight[4] *= 1e-3
    weight[5] *= 3e-6  # block scales down to the clamp
    weight[6, 16:48] = 0.0
    weight[7] = 0.0
    weight[8, ::2] = -0.0
    weight[9, 17] = -weight.abs().max()
    return weight.clamp(-6e4, 6e4).to(dtype)


@pytest.mark.parametrize("magnitude", [1e-6, 1e-3, 0.02, 1.0, 77.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [None, 0.1, 30.0])
def test_bit_identical_to_the_reference(dtype, magnitude, spread):
    """`spread` moves the global scale away from amax/2688: below 1 saturates, above 1 wastes."""
    for seed in range(3):
        weight = rough_weights(dtype, magnitude, seed)
        scale = None
        if spread is not None:
            scale = torch.tensor(spread * float(weight.abs().max()) / 2688)
        assert_matches_reference(weight, quantize(weight, global_scale=scale))


@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-30, 1e30, 3e37])
def test_bit_identical_at_the_ends_of_float32(magnitude):
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(5)) * magnitude
    tensor = quantize(weight)
    assert_matches_reference(weight, tensor)
    assert torch.isfinite(tensor.validate("weight").dequantize()).all()


@pytest.mark.parametrize("shape", [(520, 1024), (2, 16 * 33_000), (33_000, 16), (1, 16)])
def test_chunks_join_without_seams(shape):
    """More rows than one chunk holds, a row longer than a chunk, many tiny rows, one block."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(6)).bfloat16()
    assert_matches_reference(weight, quantize(weight))


def test_a_transposed_view_quantises_like_its_copy():
    view = torch.randn(64, 48, generator=torch.Generator().manual_seed(7)).T
    assert torch.equal(quantize(view).codes, quantize(view.contiguous()).codes)


def test_a_parameter_is_quantised_without_a_graph():
    tensor = quantize(torch.nn.Parameter(torch.ones(2, 16)))
    assert not tensor.dequantize().requires_grad


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation returns, views of the input aside."""

    def __init__(self, source):
        super().__init__()
        self.source, self.nbytes = source.data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if tensor.untyped_storage().data_ptr() != self.source:
                self.nbytes = max(self.nbytes, tensor.nbytes)
        return out


@pytest.mark.parametrize("N", [1024, 5120])
def test_temporaries_do_not_grow_with_the_matrix(N):
    weight = torch.randn(N, 1024).bfloat16()
    with LargestTensor(weight) as watch:
        tensor = quantize(weight)
    assert watch.nbytes == max(2 << 20, tensor.codes.nbytes)  # a chunk in float64, or the result


def test_q1_large_block_scales_become_448_and_never_nan():
    weight = torch.zeros(4, 16)
    weight[:, 0] = 6 * torch.tensor([448.0, 460.0, 470.0, 500.0])
    tensor = quantize(weight, global_scale=ONE).validate("weight")
    assert tensor.block_scale.view(torch.uint8).flatten().tolist() == [0x7E] * 4


def test_q2_an_all_zero_matrix_stays_zero(caplog):
    tensor = quantize(torch.zeros(16, 32), name="layers.0.mlp.up_proj")
    assert torch.isfinite(tensor.global_scale)
    assert tensor.global_scale > 0
    assert torch.equal(tensor.block_scale.view(torch.uint8), torch.ones(16, 2, dtype=torch.uint8))
    assert not tensor.codes.any()
    assert torch.equal(tensor.validate("weight").dequantize(), torch.zeros(16, 32))
    assert "layers.0.mlp.up_proj" in caplog.text


def test_q3_a_layer_takes_4_and_a_half_bits_per_weight():
    tensor = quantize(torch.randn(256, 256, generator=torch.Generator().manual_seed(8)))
    assert (tensor.codes.dtype, tuple(tensor.codes.shape)) == (torch.uint8, (256, 128))
    assert tensor.block_scale.dtype == torch.float8_e4m3fn
    assert tuple(tensor.block_scale.shape) == (256, 16)
    assert tensor.bits_per_parameter <= 4.6


def test_q5_the_global_scale_makes_room_for_large_weights():
    weight = torch.zeros(1, 16)
    weight[0, 7] = 5376.0
    assert quantize(weight).dequantize().max().item() == 5376.0


def test_k8_zero_blocks_and_rows_contribute_nothing():
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(9))
    weight[0, 16:32] = 0.0
    weight[1] = 0.0
    values = quantize(weight).dequantize()
    assert torch.isfinite(values).all()
    assert torch.equal(values[0, 16:32], torch.zeros(16))
    assert torch.equal(values[1], torch.zeros(64))


def test_layers_can_share_a_global_scale():
    generator = torch.Generator().manual_seed(10)
    parts = [torch.randn(16, 32, generator=generator) * size for size in (1.0, 2.0, 4.0)]
    scale = torch.tensor(4 / 2688)
    for part in parts:
        tensor = quantize(part, global_scale=scale)
        assert torch.equal(tensor.global_scale, scale)
        assert_matches_reference(part, tensor)


def with_bad(*values):
    weight = torch.zeros(4, 32)
    for index, value in enumerate(values):
        weight[index + 1, 5 * index + 3] = value
    return weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("weight", "count"),
    [
        (with_bad(math.nan), 1),
        (with_bad(math.inf), 1),
        (with_bad(-math.inf, math.nan, math.inf), 3),
    ],
)
def test_weights_that_are_not_finite_are_counted_and_located(weight, count, dtype):
    message = rf"q_proj: {count} of 128 weights are NaN or infinite, the first at .* \[1, 3\]"
    with pytest.raises(ValueError, match=message):
        quantize(weight.to(dtype), name="q_proj")


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        ([[1.0] * 16], TypeError, "q_proj: got a list"),
        (torch.zeros(4, 32).double(), TypeError, "q_proj: got dtype torch.float64, need bfloat16"),
        (torch.zeros(4, 32, dtype=torch.uint8), TypeError, "q_proj: got dtype torch.uint8"),
        (torch.zeros(4, 24), ValueError, r"q_proj: got shape \[4, 24\].* multiple of 16; leave"),
        (torch.zeros(4, 0), ValueError, r"q_proj: got shape \[4, 0\]"),
        (torch.zeros(0, 16), ValueError, r"q_proj: got shape \[0, 16\].*not empty"),
        (torch.zeros(16), ValueError, r"q_proj: got shape \[16\], need \[N, K\]"),
        (torch.zeros(2, 4, 16), ValueError, r"q_proj: got shape \[2, 4, 16\], need \[N, K\]"),
        (torch.tensor(1.0), ValueError, r"q_proj: got shape \[\]"),
    ],
)
def test_matrices_that_cannot_be_quantised(weight, error, message):
    with pytest.raises(error, match=message):
        quantize(weight, name="q_proj")


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (0.5, TypeError, "is a float, need a float32 tensor"),
        (torch.tensor(1.0).double(), TypeError, "has dtype torch.float64, need torch.float32"),
        (torch.ones(1), ValueError, r"has shape \[1\], need \[\]"),
        (torch.ones(4), ValueError, r"has shape \[4\], need \[\]"),
        (torch.tensor(0.0), ValueError, "is 0.0, need a finite multiplier > 0"),
        (torch.tensor(-1.0), ValueError, "is -1.0, need a finite multiplier > 0"),
        (torch.tensor(math.nan), ValueError, "is nan, need a finite multiplier > 0"),
        (torch.tensor(math.inf), ValueError, "is inf, need a finite multiplier > 0"),
    ],
)
def test_global_scales_that_are_refused(scale, error, message):
    with pytest.raises(error, match=f"q_proj: global_scale {message}"):
        quantize(torch.ones(4, 16), global_scale=scale, name="q_proj")
