"""Rounds blocks of 16 values to E4M3 scales and E2M1 codes, exactly, on any device.

The quantisers are made of these steps: quantize.py and methods/ choose scales and errors, here is
only what the nearest value is. Blocks lie in columns, [16, B], so that every step runs along
memory. Nothing is checked; values are finite, scales positive.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nvfp4r.format import BLOCK, E2M1_MAX, E4M3_MAX, E4M3_MIN

# Between the neighbouring magnitudes of codes i and i+1. A tie belongs to the even code, so it
# stays down for even i and goes up for odd i.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def blocks_of(matrix: Tensor) -> Tensor:
    """[rows, K] -> [16, B], B = rows * K/16: a block per column, row by row."""
    return matrix.reshape(-1, BLOCK).t().contiguous()


def e4m3_bounds(device: torch.device) -> Tensor:
    """[126] float64; entry i is the smallest value that rounds to E4M3 byte i+1, not to byte i."""
    values = torch.arange(127, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).double()
    midpoints = (values[:-1] + values[1:]) / 2
    tie_stays_down = torch.arange(126, device=device) % 2 == 0  # an even byte keeps its ties
    above = torch.nextafter(midpoints, torch.full_like(midpoints, math.inf))
    return torch.where(tie_stays_down, above, midpoints)


def nearest_scales(unrounded: Tensor, bounds: Tensor) -> Tensor:
    """E4M3 bytes nearest to block scales [B] float64, clamped to [2**-9, 448]; uint8 [B].

    A quotient of a 24-bit amax and a 26-bit product, rounded to 53 bits, can neither make nor hide
    a tie of two E4M3 values: it would have to lie within 2**-53 (relative) of a 5-bit number
    without being one, and such a quotient stays at least 2**-31 away.

    Args:
        unrounded: the wanted scales, >= 0.
        bounds: `e4m3_bounds` of the device.
    """
    clamped = unrounded.clamp(E4M3_MIN, E4M3_MAX)
    return torch.bucketize(clamped, bounds, out_int32=True, right=True).to(torch.uint8)


def block_steps(scale_bytes: Tensor, global_scale: Tensor) -> Tensor:
    """What one unit of a code is worth in each block: e4m3 * global_scale, exact in float64 [B]."""
    return scale_bytes.view(torch.float8_e4m3fn).double() * global_scale.double()


def magnitude_codes(magnitudes: Tensor, step: Tensor) -> Tensor:
    """Codes 0..7 nearest to `magnitudes / step`, ties to the even code, saturating at 7.

    Every comparison is exact. A magnitude lies above a midpoint if it exceeds midpoint * step, and
    that product has at most 3 + 4 + 24 significant bits, so float64 holds it; no quotient is
    formed.

    Args:
        magnitudes: [16, B] float64, >= 0.
        step: [B] float64, see `block_steps`.

    Returns:
        uint8 [16, B].
    """
    codes = torch.zeros(magnitudes.shape, dtype=torch.uint8, device=magnitudes.device)
    is_above = torch.empty(magnitudes.shape, dtype=torch.bool, device=magnitudes.device)
    for lower_code, midpoint in enumerate(_MIDPOINTS):
        compare = torch.ge if lower_code % 2 else torch.gt
        compare(magnitudes, step * midpoint, out=is_above)
        codes += is_above.view(torch.uint8)
    return codes


def sign_bits(blocks: Tensor) -> Tensor:
    """Bit 3 of the codes: set for values below zero, not for -0.0. uint8, same shape."""
    return (blocks < 0).view(torch.uint8) << 3


def round_blocks(
    blocks: Tensor, global_scale: Tensor, bounds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds blocks [16, B] to the nearest values, with the block scale that maps amax to 6.

    Returns:
        codes [16, B] uint8, block scale bytes [B] uint8, block scales before rounding [B] float64.
    """
    magnitudes = blocks.double().abs_()  # [16, B]
    unrounded = magnitudes.amax(0) / (E2M1_MAX * global_scale.double())
    scale_bytes = nearest_scales(unrounded, bounds)
    codes = magnitude_codes(magnitudes, block_steps(scale_bytes, global_scale))
    return codes.add_(sign_bits(blocks)), scale_bytes, unrounded
