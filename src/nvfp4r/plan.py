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

For M = 9 .. 64 (linear_medium; the same machine and conditions, 300 settings a shape) the rule is
within 2 % of the best setting found, 5 % on 10240 x 5120 at M = 16. CTAs of a cluster share K; best
setting and time in us at M = 16, 32, 64, as tiles a warp / CTAs of a cluster / clusters:

    tiles  shapes (N x K)       M = 16             M = 32             M = 64
    256    4096 x 4096          1 / 4 / 43   8.1   1 / 4 / 43  10.2   1 / 2 / 64  16.1
    256    4096 x 12288         2 / 8 / 22  15.4   1 / 4 / 43  21.7   1 / 2 / 64  33.7
    320    5120 x 5120          1 / 4 / 54   9.8   1 / 4 / 54  12.5   2 / 4 / 20  21.9
    320    5120 x 25600         2 / 8 / 27  30.0   2 / 8 / 27  42.6   2 / 4 / 27  75.2
    448    7168 x 5120          1 / 4 / 56  11.4   1 / 4 / 56  14.6   2 / 4 / 28  23.2
    640    10240 x 5120         2 / 4 / 54  14.9   1 / 2 / 107 20.8   1 / 1 / 92  37.5
    1536   24576 x 4096         2 / 2 / 128 23.0   2 / 2 / 128 31.5   2 / 1 / 96  53.5
    3200   51200 x 5120         2 / 1 / 264 55.0   2 / 2 / 132 77.2   2 / 1 / 132 126
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

MAX_SMALL_M = 8
"""Largest M of linear_small: the tokens of one matrix instruction."""

MAX_MEDIUM_M = 64
"""Largest M of linear_medium; above, a dense product on unpacked rows is the better shape."""

TILE_ROWS, TILE_COLUMNS, TILE_BYTES = 16, 128, 1152  # docs/layout.md

_DEPTH = 2
_LONG_K = 8192  # from here on more warps, or more CTAs, share the K of a tile
_BARRIER_BYTES = 8

# linear_medium: consumer warps, all warps, and bytes of 256 columns of a tile and of a token.
_MEDIUM_WARPS = 8
_MEDIUM_THREADS = 320
_UNIT_BYTES = 2 * TILE_BYTES
_TOKEN_BYTES = 528
_SUM_BYTES = 80  # of a tile and token
_MEDIUM_GROUPS = (2, 4, 6, 8)  # tokens / 8 that kernels are built for


@dataclass(frozen=True)
class DeviceFacts:
    """What a plan needs to know of a GPU."""

    sm_count: int
    shared_bytes_per_block: int
    has_pdl: bool
    has_cluster: bool


@dataclass(frozen=True)
class Plan:
    """How one product is computed.

    Attributes:
        path: "small", "medium" (kernels of those names) or "unpack" (dequantise some rows at a
            time, then a dense product).
        kernel: name in the CUDA module; "" for "unpack".
        grid: CTAs.
        threads: per CTA, producers included.
        depth: stages of the ring of weights.
        shared_bytes: dynamic shared memory of a CTA.
        pdl: launch so that its prologue overlaps the kernel before.
        reason: why this path, in a sentence for people.
        cluster: CTAs that share the K of their tiles.
        x_depth: stages of the ring of activations; 0 where there is none.
    """

    path: Literal["small", "medium", "unpack"]
    kernel: str
    grid: int
    threads: int
    depth: int
    shared_bytes: int
    pdl: bool
    reason: str
    cluster: int = 1
    x_depth: int = 0


def choose_plan(
    M: int, N: int, K: int, order: str, device: DeviceFacts, quantised: bool = False
) -> Plan:
    """The plan for x [M, K] times w [N, K] transposed.

    Args:
        M: tokens, >= 1.
        N: outputs, >= 1.
        K: inputs, a multiple of 16.
        order: bit order of the packed weight, "bf16" or "f16"; also the activations' dtype.
        quantised: whether x is rounded to NVFP4 on the way.

    Raises:
        ValueError: a size is out of range, or an unknown order.
    """
    if M < 1 or N < 1 or K < 16 or K % 16:
        raise ValueError(f"M, N, K are {M}, {N}, {K}; all must be >= 1, and K a multiple of 16")
    if order not in ("bf16", "f16"):
        raise ValueError(f"order is {order!r}; it must be bf16 or f16")
    if M <= MAX_SMALL_M:
        return _small(M, N, K, order, device, quantised)
    if M <= MAX_MEDIUM_M:
        return _medium(M, N, K, order, device)
    return _unpack(f"M = {M} is above {MAX_MEDIUM_M}, the largest of the kernels")


def _small(M: int, N: int, K: int, order: str, device: DeviceFacts, quantised: bool) -> Plan:
    tiles = -(-N // TILE_ROWS)
    warps, grid = _split(tiles, K, device.sm_count)
    stage = warps * _UNIT_BYTES + 2 * _BARRIER_BYTES
    return Plan(
        path="small",
        kernel=f"linear_small_{order}_w{warps}{'_q' if quantised else ''}",
        grid=grid,
        threads=32 * (warps + 1),
        depth=_DEPTH,
        shared_bytes=_DEPTH * stage + 2 * warps * TILE_ROWS * M * 4,
        pdl=device.has_pdl,
        reason=f"{tiles} row tiles on {device.sm_count} SMs: {warps} warps share K, {grid} CTAs",
    )


def _split(tiles: int, K: int, sms: int) -> tuple[int, int]:
    """(warps that share K, CTAs) for M <= 8; the first table at the top."""
    if tiles <= 2 * sms and K > _LONG_K:
        return 12, tiles
    if tiles <= 3 * sms:
        return 8, tiles
    if tiles <= 4 * sms:
        return 12, 2 * sms
    if tiles <= 6 * sms:
        return 4, tiles
    return 4, 6 * sms


@dataclass(frozen=True)
class _Medium:
    """Row tiles a warp holds, CTAs of a cluster, clusters, CTAs that an SM shall hold."""

    held: int
    cluster: int
    clusters: int
    per_sm: int


def _medium(M: int, N: int, K: int, order: str, device: DeviceFacts) -> Plan:
    tiles = -(-N // TILE_ROWS)
    groups = next(n for n in _MEDIUM_GROUPS if 8 * n >= M)
    for split in _medium_splits(M, tiles, K, device):
        room = (device.shared_bytes_per_block + 1024) // split.per_sm - 1024
        for depth, x_depth in _medium_depths(split):
            shared = _medium_bytes(M, groups, split.held, depth, x_depth)
            if shared > room:
                continue
            grid = split.clusters * split.cluster
            return Plan(
                path="medium",
                kernel=f"linear_medium_{order}_n{groups}_r{split.held}",
                grid=grid,
                threads=_MEDIUM_THREADS,
                depth=depth,
                shared_bytes=shared,
                pdl=device.has_pdl,
                reason=(
                    f"{tiles} row tiles on {device.sm_count} SMs: {split.clusters} groups of up to "
                    f"{split.held * _MEDIUM_WARPS} tiles, K shared by {split.cluster} CTAs"
                ),
                cluster=split.cluster,
                x_depth=x_depth,
            )
    return _unpack(f"{M} tokens do not fit the {device.shared_bytes_per_block} bytes of a CTA")


def _medium_splits(M: int, tiles: int, K: int, device: DeviceFacts) -> Iterator[_Medium]:
    """The second table at the top; then what needs less shared memory."""
    sms = device.sm_count
    per_sm = 2 if M <= 32 else 1
    if device.has_cluster:
        held, cluster, tiles_each = _medium_shares(M, tiles, K, sms)
        clusters = min(-(-tiles // tiles_each), per_sm * sms // cluster)
        yield _Medium(held, cluster, max(1, clusters), per_sm)
    yield _Medium(1, 1, min(tiles, per_sm * sms), per_sm)
    yield _Medium(1, 1, min(tiles, sms), 1)


def _medium_shares(M: int, tiles: int, K: int, sms: int) -> tuple[int, int, int]:
    """(row tiles a warp holds, CTAs of a cluster, row tiles a cluster should have)."""
    if M > 32:  # one CTA on an SM
        if tiles <= 2 * sms:
            return 1, 2, 4
        if tiles <= 4 * sms:
            return 2, 4, 16
        return (2, 2, 14) if tiles <= 8 * sms else (2, 1, 16)
    if tiles <= 4 * sms:
        if M <= 16 and K >= _LONG_K:
            return 2, 8, 12
        return 1, 4, 8 if tiles > 2.5 * sms else 6
    if tiles <= 8 * sms:
        return 1, 2, 6
    return (2 if M <= 16 and tiles > 12 * sms else 1), 1, 6


def _medium_depths(split: _Medium) -> tuple[tuple[int, int], ...]:
    """(stages of weights, stages of x), the best first."""
    if split.per_sm > 1:
        return ((2, 3), (2, 2))
    return ((3, 3), (2, 3), (2, 2), (1, 2), (1, 1))


def _medium_bytes(M: int, groups: int, held: int, depth: int, x_depth: int) -> int:
    """Shared memory of linear_medium: both rings, the sums, the barriers."""
    tiles = held * _MEDIUM_WARPS
    rings = depth * tiles * _UNIT_BYTES + x_depth * groups * 8 * _TOKEN_BYTES
    barriers = 2 * x_depth + _MEDIUM_WARPS * depth
    return rings + tiles * M * _SUM_BYTES + barriers * _BARRIER_BYTES


def _unpack(reason: str) -> Plan:
    return Plan("unpack", "", 0, 0, 0, 0, False, reason)
