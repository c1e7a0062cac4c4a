"""Which kernel multiplies M tokens with an [N, K] matrix, and with what grid: plain data.

Chosen inside the op from the shape at hand, so that tracing with one M cannot freeze the branch for
another. Knows the GPU by three numbers, launches nothing.

The rule and what it rests on (one H200, 132 SMs, 2026-11-29, bf16, CUDA graph with PDL, weights
rotated through 320 MB; a sweep of grids, warps and depths with a program that is not kept; the
resulting plans are measured by benchmarks/linear.py): a CTA needs W consumer warps; 6 CTAs of
4 warps, 3 of 8 or 2 of 12 fit on an SM. Best times in us at M = 1, and how much worse the next
choice is:

    tiles  shapes (N x K)                        best           us       others
    256    4096 x 4096                           W 8,  a tile   4.9      W 4 +12 %, W 12 +9 %
    256    4096 x 12288                          W 12, a tile   10.4     W 8 +14 %
    320    5120 x 5120, 8192, 17408, 25600       W 8,  a tile   6.7-23   W 4 +12..25 %, W 12 +13 %
    384    6144 x 4096                           W 8,  a tile   6.6      W 4 +3 %
    448    7168 x 5120                           W 12, 2 a SM   8.1      W 8 +12 %, W 4 +13 %
    640    10240 x 5120                          W 4,  a tile   10.5     W 8 +7 %
    1536   24576 x 4096                          W 4,  6 a SM   17.0     W 8 +1 %
    2176   34816 x 5120                          W 4,  6 a SM   28.4     W 8 +5 %
    3200   51200 x 5120                          W 4,  6 a SM   41       W 8 +5 %

("a tile": one CTA per row tile of 16 outputs; "6 a SM": that many CTAs walk over all tiles.)
Two stages per ring were enough; four or more cost occupancy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_SMALL_M = 16
"""Largest M of the small-batch kernel: two groups of 8 tokens."""

TILE_ROWS, TILE_COLUMNS, TILE_BYTES = 16, 128, 1152  # docs/layout.md

_DEPTH = 2
_LONG_K = 8192  # from here on 12 warps share the K of a tile better than 8 do
_BARRIER_BYTES = 16  # a full and an empty one per stage


@dataclass(frozen=True)
class DeviceFacts:
    """What a plan needs to know of a GPU: SMs, shared memory of a block, dependent launch."""

    sm_count: int
    shared_bytes_per_block: int
    has_pdl: bool


@dataclass(frozen=True)
class Plan:
    """How one product is computed.

    Attributes:
        path: "small" (the kernel below) or "unpack" (dequantise, then a dense product).
        kernel: name in the CUDA module; "" for "unpack".
        grid: CTAs.
        threads: per CTA: consumer warps and the producer.
        depth: stages of the ring.
        shared_bytes: dynamic shared memory of a CTA.
        pdl: launch so that its prologue overlaps the kernel before.
        reason: why this path, in a sentence for people.
    """

    path: Literal["small", "unpack"]
    kernel: str
    grid: int
    threads: int
    depth: int
    shared_bytes: int
    pdl: bool
    reason: str


def choose_plan(M: int, N: int, K: int, order: str, device: DeviceFacts) -> Plan:
    """The plan for x [M, K] times w [N, K] transposed.

    Args:
        M: tokens, >= 1.
        N: outputs, >= 1.
        K: inputs, a multiple of 16.
        order: bit order of the packed weight, "bf16" or "f16"; also the activations' dtype.

    Raises:
        ValueError: a size is out of range, or an unknown order.
    """
    if M < 1 or N < 1 or K < 16 or K % 16:
        raise ValueError(f"M, N, K are {M}, {N}, {K}; all must be >= 1, and K a multiple of 16")
    if order not in ("bf16", "f16"):
        raise ValueError(f"order is {order!r}; it must be bf16 or f16")
    if M > MAX_SMALL_M:
        return _unpack(f"M = {M} is above {MAX_SMALL_M}, the largest of the small-batch kernel")
    tiles, sms = -(-N // TILE_ROWS), device.sm_count
    groups = 1 if M <= 8 else 2
    warps, grid = _split(tiles, K, sms) if groups == 1 else _split_wide(tiles, sms)
    stage = warps * 2 * TILE_BYTES + _BARRIER_BYTES
    shared = _DEPTH * stage + 2 * warps * 16 * M * 4
    if shared > device.shared_bytes_per_block:
        return _unpack(f"a CTA would need {shared} bytes of shared memory")
    return Plan(
        path="small",
        kernel=f"linear_small_{order}_n{groups}_w{warps}",
        grid=grid,
        threads=32 * (warps + 1),
        depth=_DEPTH,
        shared_bytes=shared,
        pdl=device.has_pdl,
        reason=f"{tiles} row tiles on {sms} SMs: {warps} warps share K, {grid} CTAs",
    )


def _split(tiles: int, K: int, sms: int) -> tuple[int, int]:
    """(warps that share K, CTAs) for M <= 8; the table at the top."""
    if tiles <= 2 * sms and K > _LONG_K:
        return 12, tiles
    if tiles <= 3 * sms:
        return 8, tiles
    if tiles <= 4 * sms:
        return 12, 2 * sms
    if tiles <= 6 * sms:
        return 4, tiles
    return 4, 6 * sms


def _split_wide(tiles: int, sms: int) -> tuple[int, int]:
    """For M = 9 .. 16: twice the registers, so fewer CTAs fit on an SM. Not swept."""
    return (8, tiles) if tiles <= 2 * sms else (4, min(tiles, 4 * sms))


def _unpack(reason: str) -> Plan:
    return Plan("unpack", "", 0, 0, 0, 0, False, reason)
