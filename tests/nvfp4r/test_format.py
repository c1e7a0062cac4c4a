"""Bytes, tables and the tensor triple, exhaustively where they are finite."""

import math

import pytest
import torch

from nvfp4r import reference
from nvfp4r.format import (
    E2M1_VALUES,
    NVFP4Tensor,
    PartitionScales,
    decode_e2m1,
    pack_codes,
    unpack_codes,
)

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def make_tensor(N=4, K=32, global_scale=1.0, scale_byte=0x38, code_byte=0x22):
    """Every code 2 (= 1.0) and every block scale 1.0 unless told otherwise."""
    return NVFP4Tensor(
        torch.full((N, K // 2), code_byte, dtype=torch.uint8),
        torch.full((N, K // 16), scale_byte, dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.tensor(global_scale, dtype=torch.float32),
    )


def random_tensor(N, K, global_scale, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, 0x7F, (N, K // 16), dtype=torch.uint8, generator=generator)
    return NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), torch.as_tensor(global_scale))


def assert_same_bits(actual, expected):
    """Equal as numbers, in dtype, and in the sign of zeros."""
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)
    assert torch.equal(torch.signbit(actual), torch.signbit(expected))


# --- codes ----------------------------------------------------------------------------------------


def test_k2_low_nibble_is_the_even_column_and_code_8_is_negative_zero():
    packed = torch.tensor([0x21, 0x80], dtype=torch.uint8)
    assert_same_bits(decode_e2m1(unpack_codes(packed)), torch.tensor([0.5, 1.0, 0.0, -0.0]))


def test_k2_all_256_bytes_round_trip():
    unpacked = unpack_codes(ALL_BYTES)
    assert torch.equal(pack_codes(unpacked), ALL_BYTES)
    expected = [reference.e2m1(code) for b in range(256) for code in (b % 16, b // 16)]
    assert_same_bits(decode_e2m1(unpacked), torch.tensor(expected))
    # encode(decode(byte)) is the byte again, but for -0, whose sign a comparison cannot see
    codes = reference.encode_e2m1(decode_e2m1(unpacked, torch.float64))
    assert torch.equal(codes, torch.where(unpacked == 8, 0, unpacked))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_decoding_is_exact_in_every_dtype(dtype):
    codes = torch.arange(16, dtype=torch.uint8)
    expected = torch.tensor([reference.e2m1(code) for code in range(16)], dtype=torch.float64)
    assert decode_e2m1(codes, dtype).dtype == dtype
    assert torch.equal(decode_e2m1(codes, dtype).double(), expected)
    assert expected[:8].tolist() == list(E2M1_VALUES)


def test_packing_keeps_leading_dimensions():
    codes = torch.arange(16, dtype=torch.uint8).repeat(6).view(2, 3, 16)
    assert pack_codes(codes).shape == (2, 3, 8)
    assert torch.equal(unpack_codes(pack_codes(codes)), codes)


@pytest.mark.parametrize("function", [pack_codes, unpack_codes, decode_e2m1])
def test_codes_of_another_dtype_are_refused(function):
    with pytest.raises(TypeError, match=rf"{function.__name__}: got dtype torch.int32"):
        function(torch.zeros(4, dtype=torch.int32))


@pytest.mark.parametrize("function", [pack_codes, decode_e2m1])
def test_packed_bytes_where_single_codes_belong_are_refused(function):
    with pytest.raises(ValueError, match=r"got a value of 16, need 0\.\.15.*unpack_codes first"):
        function(torch.tensor([1, 16], dtype=torch.uint8))


def test_an_odd_number_of_codes_is_refused():
    with pytest.raises(ValueError, match=r"shape \[3\], need an even number"):
        pack_codes(torch.zeros(3, dtype=torch.uint8))


# --- dequantising ---------------------------------------------------------------------------------


@pytest.mark.parametrize("global_scale", [1.0, 1 / 3, 2.0**-20, 3e4, 1e-30])
def test_all_16_codes_under_all_256_scale_bytes(global_scale):
    codes = pack_codes(torch.arange(16, dtype=torch.uint8)).repeat(256, 1)
    scales = ALL_BYTES.view(torch.float8_e4m3fn).view(256, 1)
    scale = torch.tensor(global_scale)
    actual = NVFP4Tensor(codes, scales, scale).dequantize()
    rows = [[reference.e2m1(c) * reference.e4m3(b) for c in range(16)] for b in range(256)]
    exact = torch.tensor(rows, dtype=torch.float64) * scale.double()  # 30 bits: exact in float64
    is_nan = torch.zeros(256, dtype=torch.bool)
    is_nan[[0x7F, 0xFF]] = True
    assert torch.isnan(actual[is_nan]).all()
    assert_same_bits(actual[~is_nan], exact[~is_nan].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("per_row", [False, True])
def test_dequantize_rounds_once_to_float32_then_casts(dtype, per_row):
    N, K = 1100, 512  # more than one chunk of rows
    scales = torch.rand(N, generator=torch.Generator().manual_seed(1)) * 0.01 + 1e-4
    tensor = random_tensor(N, K, scales if per_row else scales[0].clone())
    assert_same_bits(tensor.dequantize(dtype), reference.dequantize(tensor).float().to(dtype))


def test_sizes_of_a_matrix():
    tensor = make_tensor(N=256, K=256)
    assert tensor.shape == (256, 256)
    assert tensor.nbytes == 256 * 128 + 256 * 16 + 4
    assert tensor.bits_per_parameter == pytest.approx(4.5, abs=1e-3)
    assert repr(tensor) == "NVFP4Tensor(N=256, K=256, global_scale=[], device='cpu')"


def test_moving_keeps_the_content():
    tensor = random_tensor(3, 32, 0.25)
    moved = tensor.to("meta")
    assert moved.device.type == "meta"
    assert moved.shape == tensor.shape
    assert_same_bits(tensor.to("cpu").dequantize(), tensor.dequantize())


# --- structure and content ------------------------------------------------------------------------

GOOD = {
    "codes": torch.zeros(4, 16, dtype=torch.uint8),
    "block_scale": torch.ones(4, 2).to(torch.float8_e4m3fn),
    "global_scale": torch.tensor(1.0),
}


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("codes", [1, 2], TypeError, "codes is a list, need a torch.Tensor"),
        ("codes", torch.zeros(4, 16), TypeError, "codes has dtype torch.float32, need torch.uint8"),
        ("block_scale", torch.ones(4, 2), TypeError, "need torch.float8_e4m3fn"),
        ("global_scale", torch.tensor(1.0).double(), TypeError, "need torch.float32"),
        ("codes", torch.zeros(16, dtype=torch.uint8), ValueError, r"shape \[16\], need \[N, K/2\]"),
        ("codes", torch.zeros(0, 16, dtype=torch.uint8), ValueError, "not empty"),
        (
            "codes",
            torch.zeros(4, 12, dtype=torch.uint8),
            ValueError,
            r"K=24, need a multiple of 16; a layer of this size must stay unquantised",
        ),
        (
            "block_scale",
            torch.ones(4, 1).to(torch.float8_e4m3fn),
            ValueError,
            r"shape \[4, 1\], need \[4, 2\].*group size 32, export again with group size 16",
        ),
        ("block_scale", GOOD["block_scale"].T, ValueError, r"shape \[2, 4\], need \[4, 2\]"),
        ("global_scale", torch.ones(1), ValueError, r"shape \[1\], need \[\] or \[4\]"),
        ("global_scale", torch.ones(4, 1), ValueError, r"shape \[4, 1\], need \[\] or \[4\]"),
        ("global_scale", torch.ones((), device="meta"), ValueError, "cpu, cpu and meta"),
    ],
)
def test_structure_is_checked_at_construction(field, value, error, message):
    with pytest.raises(error, match=message):
        NVFP4Tensor(**{**GOOD, field: value})


def with_scale_bytes(*places):
    """4 x 64 ones, with some block scale bytes replaced: (row, block, byte)."""
    tensor = make_tensor(N=4, K=64)
    for row, block, byte in places:
        tensor.block_scale.view(torch.uint8)[row, block] = byte
    return tensor


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([(1, 2, 0x7F)], r"layer: 1 of 16 NaN block scales \(0x7F or 0xFF\), first .* \[1, 2\]"),
        ([(3, 0, 0xFF), (2, 3, 0x7F)], r"layer: 2 of 16 NaN block scales.* first .* \[2, 3\]"),
        ([(0, 1, 0xB8)], r"layer: 1 of 16 negative block scales.* first .* \[0, 1\]"),
        ([(3, 3, 0x80)], r"layer: 1 of 16 negative block scales.* first .* \[3, 3\]"),
        ([(2, 1, 0), (2, 2, 0)], r"layer: 2 of 16 zero block scales over non-zero codes.*\[2, 1\]"),
    ],
)
def test_q1_bad_block_scales_are_counted_and_located(places, message):
    with pytest.raises(ValueError, match=message):
        with_scale_bytes(*places).validate("layer")


@pytest.mark.parametrize("byte", [0x00, 0x08, 0x80, 0x88])
def test_a_zero_block_scale_over_zeros_is_fine(byte):
    tensor = with_scale_bytes((2, 1, 0))
    tensor.codes[2, 8:16] = byte
    assert tensor.validate("layer") is tensor


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_bad_global_scales_are_refused(value):
    with pytest.raises(ValueError, match=rf"layer: global_scale is {value}, need a finite mult"):
        make_tensor(global_scale=value).validate("layer")


def test_a_bad_global_scale_of_one_row_is_counted():
    with pytest.raises(ValueError, match=r"layer: global_scale is 0\.0 in 2 of 4 rows"):
        make_tensor(N=4, global_scale=[1.0, 0.0, 1.0, math.nan]).validate("layer")


# --- fused layers ---------------------------------------------------------------------------------


def test_a2_fused_layers_keep_their_own_global_scale():
    gate = random_tensor(8, 64, 3.85e-5)
    up = NVFP4Tensor(gate.codes, gate.block_scale, torch.tensor(4.83e-5))
    fused = NVFP4Tensor.fuse([gate, up])
    assert fused.shape == (16, 64)
    assert_same_bits(fused.dequantize(), torch.cat([gate.dequantize(), up.dequantize()]))

    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    y = reference.linear(x, fused)
    ratio = y[:, 8:] / y[:, :8]
    assert ratio.sub(1.2545).abs().max() < 1e-3


def test_fused_layers_fuse_again():
    parts = [random_tensor(n, 32, scale, seed=n) for n, scale in ((3, 0.5), (5, 0.25), (2, 2.0))]
    nested = NVFP4Tensor.fuse([NVFP4Tensor.fuse(parts[:2]), parts[2]])
    assert_same_bits(nested.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert nested.global_scale.tolist() == [0.5] * 3 + [0.25] * 5 + [2.0] * 2


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "got no tensors"),
        ([make_tensor(K=32), make_tensor(K=64)], "K=32 on cpu, K=64 on cpu; need one K"),
    ],
)
def test_tensors_that_do_not_fuse(parts, message):
    with pytest.raises(ValueError, match=message):
        NVFP4Tensor.fuse(parts)


def garbage(count):
    return torch.full((count,), 3e38)


def test_a3_one_fused_scale_reaches_all_partitions_whatever_memory_held():
    scales = PartitionScales([4, 2, 2], storage=garbage(3))
    scales.load(0, 0.01)
    assert_same_bits(scales.per_row(), torch.full((8,), 0.01))


def test_a3_every_partition_keeps_its_scale():
    scales = PartitionScales([1, 2, 3], storage=garbage(3))
    for partition, value in ((2, 4.0), (0, 1.0), (1, torch.tensor([2.0]))):
        scales.load(partition, value)
    assert_same_bits(scales.per_row(), torch.tensor([1.0, 2.0, 2.0, 4.0, 4.0, 4.0]))


@pytest.mark.parametrize(
    ("loaded", "missing"),
    [((), "q, k, v"), ((0, 1), "v"), ((1,), "q, v"), ((2,), "q, k"), ((1, 2), "q")],
)
def test_a3_missing_partitions_are_named(loaded, missing):
    scales = PartitionScales([4, 2, 2], names=["q", "k", "v"], storage=garbage(3))
    for partition in loaded:
        scales.load(partition, 0.01)
    with pytest.raises(ValueError, match=f"missing for {missing};"):
        scales.per_row()


@pytest.mark.parametrize("value", [0.0, -0.5, math.nan, math.inf, 1e-60, torch.ones(2)])
def test_a3_bad_scales_never_reach_a_slot(value):
    scales = PartitionScales([4, 4], names=["gate", "up"])
    with pytest.raises(ValueError, match=r"up: global_scale (is|has shape)"):
        scales.load(1, value)
    assert torch.isnan(scales.values).all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rows": []}, ValueError, "rows \\[\\]"),
        ({"rows": [2, 0]}, ValueError, "rows \\[2, 0\\]"),
        ({"rows": [2], "names": ["a", "b"]}, ValueError, "2 names for 1 partitions"),
        ({"rows": [2], "storage": torch.ones(2)}, ValueError, r"shape \[2\], need \[1\]"),
        ({"rows": [2], "storage": torch.ones(1).half()}, TypeError, "dtype torch.float16"),
    ],
)
def test_partitions_that_make_no_sense(arguments, error, message):
    with pytest.raises(error, match=message):
        PartitionScales(**arguments)


def test_a_partition_that_does_not_exist():
    with pytest.raises(IndexError, match=r"partition 2, need 0\.\.1"):
        PartitionScales([4, 4]).load(2, 1.0)
