"""Rotation of blocks of 16 by a Hadamard matrix, and round to nearest in the rotated basis.

A rotated layer stores Q(rotate(W)) and computes rotate(x) @ Q(rotate(W)).T. Without Q that is
x @ W.T, as the matrix is orthogonal, symmetric and so its own inverse. It spreads an outlier over
its block, which makes values more alike but also the largest of an even block larger. How a
checkpoint says that it is rotated is the business of checkpoint/; linear.py rotates activations.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nvfp4r.format import BLOCK, NVFP4Tensor, row_chunks
from nvfp4r.quantize import check_weight, global_scale_from_amax, quantize_rows
from nvfp4r.rounding import blocks_of, round_blocks

Rotation = Literal["hadamard16"]
"""Names of rotations: "hadamard16" turns every aligned block of 16 columns by `hadamard16()`."""

_STAGES = 4  # 2**4 = BLOCK


def hadamard16(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """The matrix of the rotation, [16, 16], with entries 1/4 and -1/4 in Sylvester's order.

    Entry (i, j) is negative if i and j have an odd number of bits in common.
    """
    index = torch.arange(BLOCK, device=device)
    common = index.view(-1, 1) & index
    odd = (common ^ common >> 1 ^ common >> 2 ^ common >> 3) & 1
    return (0.25 - 0.5 * odd).to(dtype)


def rotate(x: Tensor) -> Tensor:
    """Multiplies every aligned block of 16 along the last dimension by `hadamard16()`.

    The arithmetic is float32 (float64 for float64) in a fixed order: sums and differences of
    values 1, 2, 4 and 8 columns apart, then an exact division by 4. So the result depends neither
    on the device nor on the number of rows, and rotating twice gives `x` back but for rounding. A
    NaN or an infinity makes its whole block non-finite; sums beyond float32 become infinite.

    Args:
        x: [..., K] floating, K a multiple of 16.

    Returns:
        [..., K] float32, or float64 if `x` is.

    Raises:
        TypeError: `x` is not floating.
        ValueError: K is not a multiple of 16.
    """
    if not x.is_floating_point():
        raise TypeError(f"rotate: got dtype {x.dtype}, need a floating one")
    if x.ndim == 0 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"rotate: got shape {list(x.shape)}, need a last dimension that is a multiple of "
            f"{BLOCK}"
        )
    y = x if x.dtype == torch.float64 else x.float()
    y = y.reshape(-1, BLOCK)
    for _ in range(_STAGES):
        # Each stage joins neighbours and files sums before differences, which turns the bits of
        # the column number round by one, so that four stages leave the columns in order.
        even, odd = y[:, 0::2], y[:, 1::2]
        y = torch.cat((even + odd, even - odd), dim=1)
    return (y * 0.25).view(x.shape)


def rotated_amax(weight: Tensor, name: str = "weight") -> float:
    """Largest magnitude of `rotate(weight)`, which is never held as a whole.

    Args:
        weight: [N, K] bfloat16, float16 or float32, K a multiple of 16, finite.
        name: what errors call the tensor.

    Raises:
        TypeError, ValueError: as `quantize`; sums of 16 weights may not fit float32.
    """
    _require_room(check_weight(weight, None, name), name)
    weight = weight.detach()
    N, K = weight.shape
    chunks = row_chunks(N, K, weight.device)
    return float(torch.stack([rotate(weight[rows]).abs().amax() for rows in chunks]).amax())


def quantize_rotated(
    weight: Tensor, *, global_scale: Tensor | None = None, name: str = "weight"
) -> NVFP4Tensor:
    """Rounds `rotate(weight)` to the nearest NVFP4 values, a few rows at a time.

    Args:
        weight: [N, K] bfloat16, float16 or float32, K a multiple of 16, finite, *not* rotated.
        global_scale: float32 [], the scale to use; by default that of the largest rotated weight.
        name: what errors call the tensor.

    Returns:
        The quantised rotated matrix, on the device of `weight`; it belongs to rotated inputs.

    Raises:
        TypeError, ValueError: as `quantize`; sums of 16 weights may not fit float32.
    """
    _require_room(check_weight(weight, global_scale, name), name)
    if global_scale is None:
        global_scale = global_scale_from_amax(rotated_amax(weight, name), name)
    return quantize_rows(weight, global_scale, _round_rotated_rows)


def _round_rotated_rows(
    rows: Tensor, global_scale: Tensor, bounds: Tensor
) -> tuple[Tensor, Tensor]:
    codes, scale_bytes, _ = round_blocks(blocks_of(rotate(rows)), global_scale, bounds)
    return codes, scale_bytes


def _require_room(amax: float, name: str) -> None:
    """The sums in `rotate` may reach 16 times the largest value."""
    limit = torch.finfo(torch.float32).max / BLOCK
    if amax > limit:
        raise ValueError(
            f"{name}: weights reach {amax:.3g}, need {limit:.3g} or less, as {BLOCK} of them are "
            "added in float32; use a method without rotation"
        )
