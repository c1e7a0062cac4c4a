"""The truth that tests compare with: slow, in float64, independent of the fast code.

Values come from the bit definitions of E2M1 and E4M3, the nearest value from distances to all
candidates. Nothing here is meant for large tensors: encoding holds 8 or 127 float64 per element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product

import torch
from torch import Tensor

from nvfp4r.format import NVFP4Tensor


def decode_minifloat(bits: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Value of a small float with one sign bit and IEEE subnormals; knows no inf or NaN."""
    sign = -1.0 if bits >> (exponent_bits + mantissa_bits) else 1.0
    exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (bits & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1.0 + fraction) * 2.0 ** (exponent - bias)


def e2m1(code: int) -> float:
    """Value of an E2M1 code, 0..15."""
    return decode_minifloat(code, exponent_bits=2, mantissa_bits=1, bias=1)


def e4m3(byte: int) -> float:
    """Value of an E4M3 (`fn`) byte, 0..255; 0x7F and 0xFF are NaN, there is no infinity."""
    if byte & 0x7F == 0x7F:
        return float("nan")
    return decode_minifloat(byte, exponent_bits=4, mantissa_bits=3, bias=7)


def _nearest_index(magnitude: Tensor, candidates: list[float]) -> Tensor:
    """Index of the nearest candidate; of two equally near ones, the even index.

    Args:
        magnitude: float64 of any shape, finite, >= 0.
        candidates: ascending; beyond the last one everything goes to the last.
    """
    table = torch.tensor(candidates, dtype=torch.float64)
    distance = (magnitude.unsqueeze(-1) - table).abs()
    is_nearest = distance == distance.amin(-1, keepdim=True)
    is_even = torch.arange(len(candidates)) % 2 == 0
    return (is_nearest * (1 + is_even.long())).argmax(-1)


def encode_e2m1(values: Tensor) -> Tensor:
    """uint8 codes of float64 values; the sign bit is set for values below zero."""
    magnitude = _nearest_index(values.abs(), [e2m1(code) for code in range(8)])
    return (magnitude + 8 * (values < 0)).to(torch.uint8)


def encode_e4m3(values: Tensor) -> Tensor:
    """uint8 bytes of float64 values >= 0, saturating at 448."""
    return _nearest_index(values, [e4m3(byte) for byte in range(127)]).to(torch.uint8)


def quantize(weight: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises as docs/format.md says, in float64.

    Args:
        weight: [..., K], finite, K a multiple of 16.
        global_scale: one number.

    Returns:
        codes [..., K] uint8 (not packed), block scale bytes [..., K/16] uint8, block scales before
        clamping and rounding [..., K/16] float64.
    """
    scale = float(global_scale)
    blocks = weight.detach().cpu().double().unflatten(-1, (-1, 16))
    unrounded = blocks.abs().amax(-1) / (6.0 * scale)
    scale_bytes = encode_e4m3(unrounded.clamp(2.0**-9, 448.0))
    block_scale = _lookup(scale_bytes, e4m3, 256)
    codes = encode_e2m1(blocks / (block_scale * scale).unsqueeze(-1))
    return codes.flatten(-2), scale_bytes, unrounded


def quantize_four_over_six(weight: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """For every block the scale to 6 or to 4, by the squared error in rational arithmetic.

    Args:
        weight: [..., K], finite, K a multiple of 16.
        global_scale: one number.

    Returns:
        codes [..., K] uint8 (not packed), block scale bytes [..., K/16] uint8.
    """
    scale = float(global_scale)
    blocks = weight.detach().cpu().double().unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1)
    candidates = []
    for top in (6.0, 4.0):
        scale_bytes = encode_e4m3((amax / (top * scale)).clamp(2.0**-9, 448.0))
        step = _lookup(scale_bytes, e4m3, 256) * scale
        candidates.append((encode_e2m1(blocks / step.unsqueeze(-1)), scale_bytes, step))
    codes, scale_bytes = candidates[0][0].clone(), candidates[0][1].clone()
    for where in product(*map(range, amax.shape)):
        block = blocks[where].tolist()
        to_6, to_4 = (
            squared_error(block, these[where].tolist(), float(step[where]))
            for these, _, step in candidates
        )
        if to_4 < to_6:
            codes[where], scale_bytes[where] = candidates[1][0][where], candidates[1][1][where]
    return codes.flatten(-2), scale_bytes


def squared_error(weights: Sequence[float], codes: Sequence[int], step: float) -> Fraction:
    """Sum over a block of (weight - e2m1(code) * step)**2, without any rounding."""
    differences = (
        Fraction(weight) - Fraction(e2m1(code)) * Fraction(step)
        for weight, code in zip(weights, codes, strict=True)
    )
    return sum((difference**2 for difference in differences), Fraction(0))


def quantize_activations(x: Tensor, input_scale: Tensor) -> tuple[Tensor, int]:
    """`e2m1 * e4m3` of the quantised activations [..., K] in float64, and the saturated blocks."""
    codes, scale_bytes, unrounded = quantize(x, input_scale)
    block_scale = _lookup(scale_bytes, e4m3, 256).repeat_interleave(16, -1)
    return _lookup(codes, e2m1, 16) * block_scale, int((unrounded > 464.0).sum())


def dequantize(tensor: NVFP4Tensor) -> Tensor:
    """[N, K] float64, exact: 2 + 4 + 24 significant bits at most."""
    packed = tensor.codes.cpu().long()
    codes = torch.stack((packed % 16, packed // 16), dim=-1).flatten(-2)
    scale_bytes = tensor.block_scale.cpu().view(torch.uint8)
    block_scale = _lookup(scale_bytes, e4m3, 256).repeat_interleave(16, -1)
    global_scale = tensor.global_scale.cpu().double().reshape(-1, 1)
    return _lookup(codes, e2m1, 16) * block_scale * global_scale


def linear(x: Tensor, weight: NVFP4Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` in float64.

    Args:
        x: [..., K].
        weight: N outputs, K inputs.
        bias: [N].

    Returns:
        [..., N] float64 on the CPU.
    """
    y = x.detach().cpu().double() @ dequantize(weight).T
    return y if bias is None else y + bias.detach().cpu().double()


def nearest_float32(value: Fraction) -> float:
    """The float32 nearest to a positive rational, ties to even; inf above the largest."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > value:
        exponent -= 1  # now 2**exponent <= value < 2**(exponent + 1)
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(value / quantum) * quantum  # round() of a Fraction goes to even on a tie
    return float("inf") if rounded >= Fraction(2) ** 128 else float(rounded)


def divisors(global_scale: float) -> list[float]:
    """Every float32 within 8 steps of 1/global_scale whose float32 reciprocal is `global_scale`."""
    candidate = torch.tensor(nearest_float32(1 / Fraction(global_scale)), dtype=torch.float32)
    for _ in range(8):
        candidate = torch.nextafter(candidate, torch.tensor(0.0))
    found = []
    for _ in range(17):
        if nearest_float32(1 / Fraction(float(candidate))) == global_scale:
            found.append(float(candidate))
        candidate = torch.nextafter(candidate, torch.tensor(float("inf")))
    return found


def _lookup(indices: Tensor, decode: Callable[[int], float], count: int) -> Tensor:
    """decode(index) for every index, float64."""
    table = torch.tensor([decode(index) for index in range(count)], dtype=torch.float64)
    return table[indices.long()]
