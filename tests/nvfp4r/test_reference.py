"""The reference against other people's arithmetic and against cases worked out by hand."""

import struct
from fractions import Fraction

import pytest
import torch

from nvfp4r import reference
from nvfp4r.format import NVFP4Tensor, pack_codes


def constant_weight(N, K, code, scale_bytes, global_scale=1.0):
    """[N, K] of one code, with the same block scale bytes in every row."""
    codes = torch.full((N, K), code, dtype=torch.uint8)
    scales = torch.tensor(scale_bytes, dtype=torch.uint8).expand(N, K // 16).contiguous()
    return NVFP4Tensor(
        pack_codes(codes), scales.view(torch.float8_e4m3fn), torch.tensor(global_scale)
    )


def e4m3_byte(value):
    return int(torch.tensor(value).to(torch.float8_e4m3fn).view(torch.uint8))


def test_e2m1_values():
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert [reference.e2m1(code) for code in range(16)] == magnitudes + [-m for m in magnitudes]
    assert struct.pack("d", reference.e2m1(8)) == struct.pack("d", -0.0)


def test_e4m3_agrees_with_torch_on_all_256_bytes():
    ours = torch.tensor([reference.e4m3(byte) for byte in range(256)])
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(torch.isnan(ours), torch.isnan(theirs))
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    is_number = ~torch.isnan(ours)
    assert torch.equal(torch.signbit(ours[is_number]), torch.signbit(theirs[is_number]))


def test_e4m3_encoding_agrees_with_torch_within_range():
    values = torch.rand(20_000, generator=torch.Generator().manual_seed(0)) * 12 - 10
    values = torch.cat([2.0**values, values.abs() * 40])  # 2^-10 .. 4, and 0 .. 400
    theirs = values.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(reference.encode_e4m3(values.double()), theirs)


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (6.5, 7), (1e9, 7)],
)
def test_e2m1_ties_and_saturation(value, code):
    values = torch.tensor([value, -value], dtype=torch.float64)
    assert reference.encode_e2m1(values).tolist() == [code, code + 8]


def test_quantize_agrees_with_rational_arithmetic():
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(4, 48, generator=generator) * torch.tensor([[1e-6], [1.0], [30.0], [1e4]])
    global_scale = torch.tensor(0.37)
    codes, scale_bytes, _ = reference.quantize(weight, global_scale)
    e4m3 = [Fraction(reference.e4m3(byte)) for byte in range(127)]
    e2m1 = [Fraction(reference.e2m1(code)) for code in range(8)]

    def nearest(value, table):
        return min(range(len(table)), key=lambda i: (abs(value - table[i]), i % 2))

    g = Fraction(float(global_scale))
    for row in range(4):
        for block in range(3):
            exact = [Fraction(float(w)) for w in weight[row, 16 * block : 16 * block + 16]]
            scale = max(abs(w) for w in exact) / (6 * g)
            scale = min(max(scale, Fraction(1, 512)), Fraction(448))
            byte = nearest(scale, e4m3)
            assert byte == scale_bytes[row, block]
            expected = [nearest(abs(w) / (e4m3[byte] * g), e2m1) + 8 * (w < 0) for w in exact]
            assert codes[row, 16 * block : 16 * block + 16].tolist() == expected


@pytest.mark.parametrize(
    "value",
    [
        Fraction(1, 3),
        Fraction(2688, 7),
        Fraction(2**24 + 1),  # tie, to even
        Fraction(2**24 + 3),
        Fraction(1, 2**149),
        Fraction(3, 2**150),  # tie between subnormals
        Fraction(1, 2**126) - Fraction(1, 2**160),
        Fraction(2**128) - 2**103,  # the tie above the largest goes to infinity
        Fraction(2**128) - 2**104,
    ],
)
def test_nearest_float32(value):
    # All of these are exact in float64 or far from a tie, so torch's single rounding is the truth.
    truth = torch.tensor(float(value), dtype=torch.float64).float()
    assert reference.nearest_float32(value) == float(truth)


def test_k3_subnormal_block_scales_are_decoded_exactly():
    x = torch.ones(1, 16)
    for byte, expected in ((0x04, 0.125), (0x01, 0.03125)):
        weight = constant_weight(1, 16, code=2, scale_bytes=[byte])
        assert reference.linear(x, weight).item() == expected
        assert (x @ weight.dequantize().T).item() == expected


@pytest.mark.parametrize(("scales", "expected"), [([1.0, 2.0], 48.0), ([1.0, 2.0, 4.0], 112.0)])
def test_k6_every_block_uses_its_own_scale(scales, expected):
    K = 16 * len(scales)
    weight = constant_weight(5, K, code=2, scale_bytes=[e4m3_byte(scale) for scale in scales])
    for M in (1, 8):
        assert torch.equal(
            reference.linear(torch.ones(M, K), weight),
            torch.full((M, 5), expected, dtype=torch.float64),
        )


def test_k4_the_global_scale_comes_before_a_narrow_cast():
    x, input_scale = torch.full((1, 4096), 96.0 * 2**-5), torch.tensor(2.0**-5)
    values, saturated = reference.quantize_activations(x, input_scale)
    assert torch.equal(values, torch.full_like(values, 96.0))  # code 6.0, block scale 16
    assert saturated == 0
    weight = constant_weight(1, 4096, 7, [e4m3_byte(16.0)] * 256, 1e-3 / 2**-5)
    y = reference.linear(values * input_scale.double(), weight)
    assert y.item() == pytest.approx(37748.7, rel=5e-3)
    assert torch.isfinite(y.half()).all()
    assert not torch.isfinite((y / 1e-3).half()).all()  # the fault: cast first, scale later


def test_linear_adds_the_bias_exactly():
    weight = constant_weight(6, 32, code=7, scale_bytes=[0x38, 0x38])
    bias = torch.arange(1.0, 7.0)
    assert torch.equal(reference.linear(torch.zeros(2, 3, 32), weight, bias)[1, 2], bias.double())
