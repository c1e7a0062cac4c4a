"""Four over six against the reference, which decides in rational arithmetic, and its worth."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from nvfp4r import reference
from nvfp4r.checkpoint import load_checkpoint
from nvfp4r.checkpoint.writer import save_checkpoint
from nvfp4r.format import unpack_codes
from nvfp4r.methods.four_over_six import global_scale_four_over_six, quantize_four_over_six
from nvfp4r.quantize import divisor_for, global_scale_from_amax, quantize
from nvfp4r.selection import plan_conversion

ONE = torch.tensor(1.0)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def assert_matches_reference(weight, tensor):
    codes, scale_bytes = reference.quantize_four_over_six(weight, tensor.global_scale)
    assert torch.equal(tensor.block_scale.view(torch.uint8), scale_bytes)
    assert torch.equal(unpack_codes(tensor.codes), codes)


def block(*values):
    """[1, 16], zeros after the given values."""
    return torch.tensor([[*values, *[0.0] * (16 - len(values))]])


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("values", "scale", "codes"),
    [
        ((12.0, 9.0), 3.0, [6, 5]),  # 4 and 3 steps of 3; of 2, they would be 6 and 4.5
        ((12.0, 8.0), 2.0, [7, 6]),  # 6 and 4 steps of 2; of 3, they would be 4 and 2.67
        ((12.0,), 2.0, [7]),  # exact either way: a tie, which goes to 6
        ((12.0, 7.0), 2.0, [7, 6]),  # 3.5 steps of 2, 2.33 of 3: both are 1 off, another tie
    ],
)
def test_a_block_by_hand(values, scale, codes, sign):
    tensor = quantize_four_over_six(sign * block(*values), global_scale=ONE)
    assert tensor.block_scale.float().item() == scale
    negative = 8 if sign < 0 else 0
    got = unpack_codes(tensor.codes)[0].tolist()
    assert [code - negative for code in got[: len(codes)]] == codes
    assert got[len(codes) :] == [0] * (16 - len(codes))


def test_the_tie_by_hand_is_one():
    """7 rounds to 8 (4 steps of 2, the even code) and to 6 (2 steps of 3)."""
    assert reference.squared_error([12, 7], [7, 6], 2) == 1
    assert reference.squared_error([12, 7], [6, 4], 3) == 1


def rough_weights(dtype, magnitude, seed):
    """[16, 64] gaussian, with an outlier, small rows, zero blocks and rows, and signed zeros."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)) * magnitude
    weight[3, 5] *= 60
    weight[4] *= 1e-3
    weight[5] *= 3e-6  # block scales down to the clamp
    weight[6, 16:48] = 0.0
    weight[7] = 0.0
    weight[8, ::2] = -0.0
    weight[9, 17] = -weight.abs().max()
    return weight.clamp(-6e4, 6e4).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [1e-6, 0.02, 1e4])
@pytest.mark.parametrize("spread", [None, 0.1, 0.6, 30.0])
def test_bit_identical_to_the_reference(dtype, magnitude, spread):
    """`spread` moves the global scale away from amax/1536: below 0.57 blocks saturate."""
    for seed in range(2):
        weight = rough_weights(dtype, magnitude, seed)
        scale = None
        if spread is not None:
            scale = torch.tensor(spread * float(weight.abs().max()) / 1536)
        tensor = quantize_four_over_six(weight, global_scale=scale)
        assert_matches_reference(weight, tensor)
        tensor.validate("weight")


@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-30, 1e30, 3e37])
def test_bit_identical_at_the_ends_of_float32(magnitude):
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(5)) * magnitude
    tensor = quantize_four_over_six(weight)
    assert_matches_reference(weight, tensor)
    assert torch.isfinite(tensor.validate("weight").dequantize()).all()


def test_bit_identical_on_few_bits():
    """Small integers under a global scale of 1: exact hits and exact ties of both errors abound."""
    random = torch.Generator().manual_seed(6)
    weight = torch.randint(-24, 25, (24, 256), generator=random) * 0.5
    tensor = quantize_four_over_six(weight, global_scale=ONE)
    assert_matches_reference(weight, tensor)
    to_6 = quantize(weight, global_scale=ONE)
    assert 0.05 < float((tensor.block_scale.float() != to_6.block_scale.float()).float().mean()) < 1


def exact_errors(weight, tensor):
    """Squared error of every block, without rounding."""
    codes = unpack_codes(tensor.codes).view(-1, 16).tolist()
    steps = tensor.block_scale.double().flatten() * tensor.global_scale.double()
    blocks = weight.double().view(-1, 16).tolist()
    return [
        reference.squared_error(*entry) for entry in zip(blocks, codes, steps.tolist(), strict=True)
    ]


@pytest.mark.parametrize("spread", [0.1, 4 / 7, 1.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_block_is_worse_than_scaled_to_6(dtype, spread):
    """Block by block under one global scale; the choice is better for some and never costs."""
    weight = rough_weights(dtype, 0.05, seed=7)
    scale = spread * global_scale_four_over_six(weight.float().abs().max())
    ours = exact_errors(weight, quantize_four_over_six(weight, global_scale=scale))
    to_6 = exact_errors(weight, quantize(weight, global_scale=scale))
    assert all(mine <= other for mine, other in zip(ours, to_6, strict=True))
    assert sum(mine < other for mine, other in zip(ours, to_6, strict=True)) > len(ours) / 8


def test_both_scales_of_the_largest_weight_fit():
    weight = block(1536.0, 1152.0)  # 6 and 4.5 steps of 256; 4 and 3 of 384
    tensor = quantize_four_over_six(weight)
    assert float(tensor.global_scale) == 1.0
    assert tensor.block_scale.float().item() == 384.0
    assert torch.equal(tensor.dequantize(), weight)


def test_without_room_a_block_stays_at_6():
    """Under the scale of round to nearest, the largest block needs 448; 672 does not exist."""
    weight = block(2688.0, 2016.0)
    tensor = quantize_four_over_six(weight, global_scale=ONE).validate("weight")
    assert tensor.block_scale.float().item() == 448.0


def test_a_block_too_large_for_either_scale_saturates():
    tensor = quantize_four_over_six(block(1e6, -1e6, 1.0), global_scale=ONE).validate("weight")
    assert tensor.block_scale.float().item() == 448.0
    assert unpack_codes(tensor.codes)[0, :3].tolist() == [7, 15, 0]


def test_blocks_of_zeros_stay_zero(caplog):
    tensor = quantize_four_over_six(torch.zeros(4, 32), name="mlp.up_proj").validate("mlp.up_proj")
    assert float(tensor.global_scale) == 1.0
    assert torch.equal(tensor.block_scale.view(torch.uint8), torch.ones(4, 2, dtype=torch.uint8))
    assert not tensor.codes.any()
    assert "mlp.up_proj" in caplog.text


@pytest.mark.parametrize("shape", [(520, 1024), (2, 16 * 33_000)])
def test_chunks_join_without_seams(shape):
    """Each row as it is alone; the rows around the seam also as the reference has them."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(8)).bfloat16()
    whole = quantize_four_over_six(weight)
    for row in (0, shape[0] // 2, shape[0] - 1):
        alone = quantize_four_over_six(weight[row : row + 1], global_scale=whole.global_scale)
        assert torch.equal(whole.codes[row], alone.codes[0])
        assert torch.equal(
            whole.block_scale[row].view(torch.uint8), alone.block_scale[0].view(torch.uint8)
        )
    corner = weight[-1:, -512:]
    codes, scale_bytes = reference.quantize_four_over_six(corner, whole.global_scale)
    assert torch.equal(unpack_codes(whole.codes)[-1:, -512:], codes)
    assert torch.equal(whole.block_scale.view(torch.uint8)[-1:, -32:], scale_bytes)


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_do_not_change_the_bits(threads):
    weight = torch.randn(256, 2048, generator=torch.Generator().manual_seed(9))
    expected = quantize_four_over_six(weight)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tensor = quantize_four_over_six(weight)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(tensor.codes, expected.codes)
    assert torch.equal(tensor.block_scale.view(torch.uint8), expected.block_scale.view(torch.uint8))


@pytest.mark.parametrize("amax", [10.0, 0.0371, 1e-20, 3.4e38, 1e-30])
def test_the_global_scale_is_amax_over_1536_with_a_divisor(amax):
    amax_tensor = torch.tensor(amax)
    scale = global_scale_four_over_six(amax_tensor, "layer")
    wanted = torch.tensor(reference.nearest_float32(Fraction(float(amax_tensor)) / 1536))
    assert abs(int(scale.view(torch.int32)) - int(wanted.view(torch.int32))) <= 1
    divisor = divisor_for(scale)
    assert divisor is not None
    assert reference.nearest_float32(1 / Fraction(float(divisor))) == float(scale)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(value):
    weight = torch.zeros(4, 32)
    weight[1, 3] = value
    with pytest.raises(ValueError, match=r"q_proj: 1 of 128 weights are NaN or .* \[1, 3\]"):
        quantize_four_over_six(weight, name="q_proj")
    with pytest.raises(ValueError, match=r"q_proj: amax is (nan|-?inf), need a finite"):
        global_scale_four_over_six(value, "q_proj")


@pytest.mark.parametrize(
    ("weight", "scale", "error", "message"),
    [
        (torch.zeros(4, 32).double(), None, TypeError, "got dtype torch.float64"),
        (torch.zeros(4, 24), None, ValueError, r"got shape \[4, 24\].* multiple of 16"),
        (torch.zeros(16), None, ValueError, r"got shape \[16\], need \[N, K\]"),
        (torch.ones(4, 16), torch.ones(4), ValueError, r"global_scale has shape \[4\]"),
        (torch.ones(4, 16), torch.tensor(0.0), ValueError, "global_scale is 0.0"),
    ],
)
def test_matrices_and_scales_that_are_refused(weight, scale, error, message):
    with pytest.raises(error, match=f"q_proj: {message}"):
        quantize_four_over_six(weight, global_scale=scale, name="q_proj")


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_readers_take_the_scale_that_is_stored(tmp_path, dialect):
    """The largest weight need not be 2688 global scales: 1.75 times less here."""
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(10)).bfloat16()
    tensor = quantize_four_over_six(weight)
    by_2688 = global_scale_from_amax(weight.float().abs().max())
    assert float(tensor.global_scale / by_2688) == pytest.approx(1.75, rel=1e-6)
    save_checkpoint(tmp_path / "out", [("up_proj.weight", tensor)], config={}, dialect=dialect)
    read = load_checkpoint(tmp_path / "out")["up_proj.weight"]
    assert torch.equal(read.global_scale, tensor.global_scale)
    assert torch.equal(read.dequantize(), tensor.dequantize())


def relative_error(weight, tensor):
    return float((tensor.dequantize() - weight).norm() / weight.norm())


@pytest.mark.model
@pytest.mark.parametrize("layer", [0, 14, 29])
def test_real_weights_get_closer_than_by_rounding_to_nearest(smollm2, layer):
    """Every matrix by 5 % or more, under the scales that a checkpoint would have: each method's
    own, shared in fused groups."""
    plan = plan_conversion(smollm2)
    weights = {
        name: plan.tensors.get(f"{name}.weight").float()
        for name in plan.quantised
        if f".layers.{layer}." in name
    }
    assert len(weights) == 7
    groups = {name: group for group in plan.groups for name in group}
    for name, weight in weights.items():
        amax = max(weights[member].abs().max() for member in groups.get(name, (name,)))
        ours = quantize_four_over_six(weight, global_scale=global_scale_four_over_six(amax))
        to_6 = quantize(weight, global_scale=global_scale_from_amax(amax))
        assert relative_error(weight, ours) < 0.95 * relative_error(weight, to_6), name
