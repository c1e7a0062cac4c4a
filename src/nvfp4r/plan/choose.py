"""Which kernel multiplies M tokens with an [N, K] matrix, and with what grid: plain data.

Chosen inside the op from the shape at hand, so that tracing with one M cannot freeze the branch for
another. Knows the GPU by `DeviceFacts`, launches nothing.

The rules rest on measurements, one H200, 132 SMs, 2026-11-29, bf16, CUDA graph with PDL, weights
rotated through 320 MB: for up to 8 tokens in small.py, for 9 to 64 in medium.py, for many
on compute capability 9.0 in large.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from nvfp4r.plan.large import (
    LARGE_WARPS,
    MAX_LARGE_M,
    MIN_LARGE_M,
    LargeSplit,
    large_fault,
    large_split,
    prefers_medium,
)
from nvfp4r.plan.medium import (
    MAX_KERNEL_M,
    MAX_MEDIUM_M,
    MEDIUM_THREADS,
    MEDIUM_WARPS,
    MediumSplit,
    medium_fault,
    medium_split,
    room,
    token_groups,
)
from nvfp4r.plan.small import (
    MAX_SMALL_M,
    SmallSplit,
    prepares_on_the_way,
    small_fault,
    small_split,
)

TOKEN_RANGES = ((1, 2), (3, 8), (9, 16), (17, 32), (33, 48), (49, 64))
"""First and last M that share a plan, so that the bits of a row do not depend on M."""

TILE_ROWS, TILE_COLUMNS, TILE_BYTES = 16, 128, 1152  # docs/layout.md


@dataclass(frozen=True)
class DeviceFacts:
    """What a plan needs to know of a GPU."""

    sm_count: int
    shared_bytes_per_block: int
    has_pdl: bool
    has_cluster: bool
    has_wgmma: bool = False


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

    def __hash__(self) -> int:  # of a few of the fields: every call looks its plan up
        return hash((self.kernel, self.grid, self.depth, self.passes))


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
        quantised: whether x has to be rounded to NVFP4, or rotated.

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
        split = medium_split(M, tiles, K, sms, device.shared_bytes_per_block, device.has_cluster)
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
        threads=MEDIUM_THREADS,
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


def shared_bytes(split: Split, M: int, K: int) -> int:
    """Dynamic shared memory of a CTA for M tokens: rings, barriers, sums."""
    if isinstance(split, SmallSplit):
        return split.shared_bytes(M, K)
    if isinstance(split, LargeSplit):
        return split.shared_bytes
    return split.shared_bytes(M)


def even_shared_bytes(plan: Plan, device: DeviceFacts) -> int:
    """So much shared memory a CTA that no SM takes more of them than an even share.

    For a kernel that starts while CTAs of others still run. The SMs that hold those come last when
    its own are handed out, and without this another SM may get one too many (docs/log.md).
    """
    share = -(-plan.grid // device.sm_count)
    return max(plan.shared_bytes, room(device.shared_bytes_per_block, share + 1) + 1)


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
    elif isinstance(split, SmallSplit):
        fault = small_fault(split, M, tiles)
    else:
        fault = medium_fault(split, M, tiles, device.has_cluster)
    if fault:
        return fault
    needed = shared_bytes(split, M, K)
    if needed > device.shared_bytes_per_block:
        return f"{needed} bytes of shared memory, a CTA has {device.shared_bytes_per_block}"
    return None


def _unpack(reason: str) -> Plan:
    return Plan("unpack", "", 0, 0, 0, 0, False, reason)
