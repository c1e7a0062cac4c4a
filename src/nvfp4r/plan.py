"""Which kernel multiplies M tokens with an [N, K] matrix, and with what grid: plain data.

Chosen inside the op from the shape at hand, so that tracing with one M cannot freeze the branch for
another. Knows the GPU by three numbers, launches nothing.

The rules rest on measurements, one H200, 132 SMs, 2026-11-29, bf16, CUDA graph with PDL, weights
rotated through 320 MB. Those for up to 8 tokens are in plan_small.py, those for many tokens on
compute capability 9.0 in plan_large.py.

For M = 9 .. 64 (linear_medium; the same machine and conditions, 300 settings a shape) the rule is
within 2 % of the best setting found, 5 % on 10240 x 5120 at M = 16 (with the version before a
warp's two row tiles were spread 8 apart). CTAs of a cluster share K; best
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

For M = 65 .. 192 linear_medium runs two or three times over equal parts of the tokens. Measured:
one pass of 64 tokens against unpacking for 128 tokens; 1,024 tokens, so the slope of unpacking
(us); from them the number of tokens at which unpacking is as fast:

    shapes (N x K)    64 tokens   128, unpacked   1024, unpacked   equal at
    4096 x 12288      35          119             238              246
    5120 x 25600      78          287             607              280
    24576 x 4096      56          220             556              344
    51200 x 5120      123         576             1376             449
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from nvfp4r.plan_large import (
    LARGE_WARPS,
    MAX_LARGE_M,
    MIN_LARGE_M,
    LargeSplit,
    large_fault,
    large_split,
    prefers_medium,
)
from nvfp4r.plan_small import (
    MAX_SMALL_M,
    SmallSplit,
    prepares_on_the_way,
    small_fault,
    small_split,
)

MAX_MEDIUM_M = 64
"""Largest M of linear_medium."""

MAX_KERNEL_M = 192
"""Largest M of linear_medium, in passes; above, a dense product on unpacked rows is faster. Where
linear_large is built it takes all M above 32 instead."""

TOKEN_RANGES = ((1, 2), (3, 8), (9, 16), (17, 32), (33, 48), (49, 64))
"""First and last M that share a plan, so that the bits of a row do not depend on M."""

TILE_ROWS, TILE_COLUMNS, TILE_BYTES = 16, 128, 1152  # docs/layout.md

MEDIUM_HELD: Mapping[int, tuple[int, ...]] = {2: (1, 2), 4: (1,), 6: (1, 2), 8: (1, 2)}
"""Tokens / 8 that linear_medium is built for, and with each the row tiles that a warp may hold."""

MEDIUM_WARPS = 8
"""Consumer warps of linear_medium."""

CLUSTERS = (1, 2, 4, 8)
"""CTAs that may form a cluster."""

_LONG_K = 8192  # from here on more warps, or more CTAs, share the K of a tile
_BARRIER_BYTES = 8

# linear_medium: all its threads, and bytes of 256 columns of a tile and of a token.
_MEDIUM_THREADS = 320
_UNIT_BYTES = 2 * TILE_BYTES
_TOKEN_BYTES = 528
_SUM_BYTES = 80  # of a tile and token
# (stages of weights, stages of x), the best first, if an SM shall hold two CTAs or one.
_DEPTHS_OF_TWO = ((2, 3), (2, 2))
_DEPTHS_OF_ONE = ((3, 3), (2, 3), (2, 2), (1, 2), (1, 1))


@dataclass(frozen=True)
class DeviceFacts:
    """What a plan needs to know of a GPU."""

    sm_count: int
    shared_bytes_per_block: int
    has_pdl: bool
    has_cluster: bool
    has_wgmma: bool = False


@dataclass(frozen=True)
class MediumSplit:
    """How linear_medium shares its work.

    Attributes:
        held: row tiles a warp holds at once.
        cluster: CTAs that share the K of their tiles.
        clusters: groups of CTAs that share the tiles.
        depth: stages of the ring of weights.
        x_depth: stages of the ring of activations.
    """

    held: int
    cluster: int
    clusters: int
    depth: int
    x_depth: int


Split = SmallSplit | MediumSplit | LargeSplit


@dataclass(frozen=True)
class Plan:
    """How one product is computed.

    Attributes:
        path: "small", "medium", "large" (kernels of those names) or "unpack" (dequantise some rows
            at a time, then a dense product).
        kernel: name in the CUDA module; "" for "unpack".
        grid: CTAs.
        threads: per CTA, producers included.
        depth: stages of the ring of weights.
        shared_bytes: dynamic shared memory of a CTA.
        pdl: launch so that its prologue overlaps the kernel before.
        reason: why this path, in a sentence for people.
        cluster: CTAs that share the K of their tiles.
        x_depth: stages of the ring of activations; 0 where there is none.
        split: what of this may be chosen otherwise; None for "unpack".
        passes: how often the kernel runs, each time for an equal part of the tokens.
        apart: where x is to be rotated or rounded, a kernel of its own does it before.
    """

    path: Literal["small", "medium", "large", "unpack"]
    kernel: str
    grid: int
    threads: int
    depth: int
    shared_bytes: int
    pdl: bool
    reason: str
    cluster: int = 1
    x_depth: int = 0
    split: Split | None = None
    passes: int = 1
    apart: bool = False


@lru_cache(maxsize=1 << 14)  # every layer asks again at every step; the answer is immutable
def choose_plan(
    M: int, N: int, K: int, order: str, device: DeviceFacts, quantised: bool = False
) -> Plan:
    """The plan for x [M, K] times w [N, K] transposed, by the rule at the top.

    Args:
        M: tokens, >= 1.
        N: outputs, >= 1.
        K: inputs, a multiple of 16.
        order: bit order of the packed weight, "bf16" or "f16"; also the activations' dtype.
        quantised: whether x is rounded to NVFP4, or rotated, on the way.

    Raises:
        ValueError: a size is out of range, or an unknown order.
    """
    _require_sizes(M, N, K, order)
    tiles, sms = -(-N // TILE_ROWS), device.sm_count
    if device.has_wgmma and M >= MIN_LARGE_M and not prefers_medium(M, tiles, sms):
        return _large_plan(M, N, K, order, device, quantised)
    if M > MAX_KERNEL_M:
        return _unpack(f"M = {M} is above {MAX_KERNEL_M}, the largest of the kernels")
    passes = passes_for(M)
    if passes > 1:
        part = choose_plan(-(-M // passes), N, K, order, device, quantised)
        return in_passes(part, passes)
    where = f"{tiles} row tiles on {sms} SMs"
    split: Split | None
    if M <= MAX_SMALL_M:
        split = small_split(M, tiles, K, sms, device.shared_bytes_per_block)
        reason = f"{where}: {split.warps} warps share K, {split.grid} CTAs"
        if split.shared_x:
            reason += ", x in shared memory"
    else:
        split = _medium_split(M, tiles, K, device)
        if split is None:
            return _unpack(
                f"{M} tokens do not fit the {device.shared_bytes_per_block} bytes of a CTA"
            )
        reason = (
            f"{where}: {split.clusters} groups of up to {split.held * MEDIUM_WARPS} tiles, "
            f"K shared by {split.cluster} CTAs"
        )
    return plan_with(split, M, N, K, order, device, quantised, reason=reason)


def plan_with(
    split: Split,
    M: int,
    N: int,
    K: int,
    order: str,
    device: DeviceFacts,
    quantised: bool = False,
    *,
    reason: str,
) -> Plan:
    """The plan for a product whose work is shared in a given way.

    Args:
        split: a SmallSplit for M = 1 .. 8, a MediumSplit for M = 9 .. 64, a LargeSplit for
            M = 1 .. 8192.
        reason: why this way.
        M, N, K, order, device, quantised: as for `choose_plan`.

    Raises:
        ValueError: no kernel is built for it, or it does not fit the GPU or the matrix.
    """
    _require_sizes(M, N, K, order)
    tiles = -(-N // TILE_ROWS)
    fault = _fault(split, M, tiles, K, device)
    if fault:
        raise ValueError(f"{split} for M, N, K = {M}, {N}, {K}: {fault}")
    if isinstance(split, SmallSplit):
        return Plan(
            path="small",
            kernel=f"linear_small_{order}_w{split.warps}{'_s' if split.shared_x else ''}",
            grid=split.grid,
            threads=split.threads,
            depth=split.depth,
            shared_bytes=split.shared_bytes(M, K),
            pdl=device.has_pdl,
            reason=reason,
            split=split,
            apart=quantised and not prepares_on_the_way(split),
        )
    if isinstance(split, LargeSplit):
        return Plan(
            path="large",
            kernel=f"linear_large_{order}_n{split.token_groups}_r{split.held}",
            grid=split.clusters * split.cluster,
            threads=split.threads,
            depth=split.depth,
            shared_bytes=split.shared_bytes,
            pdl=device.has_pdl,
            reason=reason,
            cluster=split.cluster,
            x_depth=split.x_depth,
            split=split,
        )
    return Plan(
        path="medium",
        kernel=f"linear_medium_{order}_n{token_groups(M)}_r{split.held}",
        grid=split.clusters * split.cluster,
        threads=_MEDIUM_THREADS,
        depth=split.depth,
        shared_bytes=shared_bytes(split, M, K),
        pdl=device.has_pdl,
        reason=reason,
        cluster=split.cluster,
        x_depth=split.x_depth,
        split=split,
        apart=quantised,
    )


def _large_plan(M: int, N: int, K: int, order: str, device: DeviceFacts, quantised: bool) -> Plan:
    passes = -(-M // MAX_LARGE_M)
    if passes > 1:
        part = _large_plan(-(-M // passes), N, K, order, device, quantised)
        return in_passes(part, passes)
    tiles = -(-N // TILE_ROWS)
    split = large_split(M, tiles, K, device.sm_count, device.shared_bytes_per_block)
    tokens = -(-M // (8 * split.token_groups))
    reason = (
        f"{tiles} row tiles on {device.sm_count} SMs: {split.row_units} x {tokens} units of up to "
        f"{split.held * LARGE_WARPS} tiles x {8 * split.token_groups} tokens, K shared by "
        f"{split.cluster} CTAs"
    )
    return plan_with(split, M, N, K, order, device, quantised, reason=reason)


def passes_for(M: int, has_wgmma: bool = False) -> int:
    """How often a kernel of up to 64 tokens has to run for M, 1 .. 192; 1 where linear_large is."""
    return 1 if has_wgmma else -(-M // MAX_MEDIUM_M)


def in_passes(part: Plan, passes: int) -> Plan:
    """The plan that runs the plan of one part of the tokens for each part."""
    if part.path == "unpack":
        return part
    return replace(part, passes=passes, reason=f"{passes} passes; {part.reason}")


def token_range(M: int) -> tuple[int, int]:
    """First and last of the M that share a plan with this one, 1 .. 64."""
    return next(bounds for bounds in TOKEN_RANGES if bounds[1] >= M)


def token_groups(M: int) -> int:
    """Tokens / 8 of the linear_medium that takes M tokens, 9 .. 64."""
    return next(groups for groups in MEDIUM_HELD if 8 * groups >= M)


def shared_bytes(split: Split, M: int, K: int) -> int:
    """Dynamic shared memory of a CTA for M tokens: rings, barriers, sums."""
    if isinstance(split, SmallSplit):
        return split.shared_bytes(M, K)
    if isinstance(split, LargeSplit):
        return split.shared_bytes
    tiles = split.held * MEDIUM_WARPS
    x_bytes = token_groups(M) * 8 * _TOKEN_BYTES
    rings = split.depth * tiles * _UNIT_BYTES + split.x_depth * x_bytes
    barriers = 2 * split.x_depth + MEDIUM_WARPS * (split.depth + 1)
    return rings + tiles * M * _SUM_BYTES + barriers * _BARRIER_BYTES


def _require_sizes(M: int, N: int, K: int, order: str) -> None:
    if M < 1 or N < 1 or K < 16 or K % 16:
        raise ValueError(f"M, N, K are {M}, {N}, {K}; all must be >= 1, and K a multiple of 16")
    if order not in ("bf16", "f16"):
        raise ValueError(f"order is {order!r}; it must be bf16 or f16")


def _fault(split: Split, M: int, tiles: int, K: int, device: DeviceFacts) -> str | None:
    """What makes a split impossible, if anything does."""
    if isinstance(split, LargeSplit):
        if not device.has_wgmma:
            return "linear_large is built for GPUs of compute capability 9.0"
        fault = large_fault(split, M, tiles)
        if fault:
            return fault
    elif isinstance(split, SmallSplit):
        fault = small_fault(split, M, tiles)
        if fault:
            return fault
    else:
        if not MAX_SMALL_M < M <= MAX_MEDIUM_M:
            return f"linear_medium takes {MAX_SMALL_M + 1} to {MAX_MEDIUM_M} tokens"
        if split.held not in MEDIUM_HELD[token_groups(M)]:
            return f"linear_medium is built for {MEDIUM_HELD[token_groups(M)]} row tiles a warp"
        if split.cluster not in (CLUSTERS if device.has_cluster else (1,)):
            return f"{split.cluster} CTAs cannot form a cluster"
        if min(split.depth, split.x_depth) < 1:
            return "a ring has at least one stage"
        if not 1 <= split.clusters <= tiles:
            return f"{split.clusters} groups of CTAs cannot share {tiles} row tiles"
    needed = shared_bytes(split, M, K)
    if needed > device.shared_bytes_per_block:
        return f"{needed} bytes of shared memory, a CTA has {device.shared_bytes_per_block}"
    return None


def _medium_split(M: int, tiles: int, K: int, device: DeviceFacts) -> MediumSplit | None:
    """The first of the rule's splits that leaves an SM room for as many CTAs as it counts on."""
    for held, cluster, clusters, per_sm in _medium_shares(M, tiles, K, device):
        for depth, x_depth in _DEPTHS_OF_TWO if per_sm > 1 else _DEPTHS_OF_ONE:
            split = MediumSplit(held, cluster, clusters, depth, x_depth)
            if shared_bytes(split, M, K) <= room(device, per_sm):
                return split
    return None


def room(device: DeviceFacts, per_sm: int) -> int:
    """Dynamic shared memory that a CTA may use if an SM shall hold `per_sm` of them."""
    return (device.shared_bytes_per_block + 1024) // per_sm - 1024


def _medium_shares(
    M: int, tiles: int, K: int, device: DeviceFacts
) -> Iterator[tuple[int, int, int, int]]:
    """(row tiles a warp holds, CTAs of a cluster, clusters, CTAs that an SM shall hold).

    The second table at the top; then what needs less shared memory.
    """
    sms = device.sm_count
    per_sm = 2 if M <= 32 else 1
    if device.has_cluster:
        held, cluster, tiles_each = _cluster_shares(M, tiles, K, sms)
        clusters = min(-(-tiles // tiles_each), per_sm * sms // cluster)
        yield held, cluster, max(1, clusters), per_sm
    yield 1, 1, min(tiles, per_sm * sms), per_sm
    yield 1, 1, min(tiles, sms), 1


def _cluster_shares(M: int, tiles: int, K: int, sms: int) -> tuple[int, int, int]:
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


def _unpack(reason: str) -> Plan:
    return Plan("unpack", "", 0, 0, 0, 0, False, reason)
