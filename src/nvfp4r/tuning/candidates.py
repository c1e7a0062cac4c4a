"""Plans that `nvfp4r bench --tune` measures beside the one that the rule of plan/ chooses.

Plain data, launches nothing. All splits are legal and the same for every M of a range, so that any
of them may serve the whole range (plan/choose.py says why that matters). linear_large is not among
them: where the rule chooses it, for 33 to 64 tokens, linear_medium is what is tried beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

from nvfp4r.plan import (
    TILE_COLUMNS,
    TILE_ROWS,
    DeviceFacts,
    Plan,
    Split,
    plan_with,
    token_range,
)
from nvfp4r.plan.medium import MAX_MEDIUM_M, MEDIUM_HELD, MediumSplit, room, token_groups
from nvfp4r.plan.small import MAX_SMALL_M, SMALL_WARPS, SmallSplit
from nvfp4r.plan.sums import CLUSTERS

_CTAS_PER_SM = {False: (2, 3, 4, 5, 6), True: (1, 2, 3, 4)}  # of linear_small, linear_shared
_SMALL_DEPTHS = {False: (2,), True: (2, 3)}
_TILES_PER_CLUSTER = (2, 4, 6, 8, 12, 14, 16)
_DEPTHS = ((1, 1), (1, 2), (2, 2), (2, 3), (3, 2), (3, 3), (4, 3))  # of weights, of x
_MOST_TOKENS_FOR_TWO = 32  # with more, a CTA of linear_medium takes all registers of an SM


def candidate_plans(
    M: int, N: int, K: int, order: str, facts: DeviceFacts, quantised: bool = False
) -> list[Plan]:
    """Every plan that is worth a measurement, in an order that is the same for all M of a range.

    Args:
        M: tokens, 1 .. 64.
        N: outputs, >= 1.
        K: inputs, a multiple of 16.
        order: bit order of the packed weight, "bf16" or "f16".
        facts: of the GPU.
        quantised: whether x has to be rounded to NVFP4.

    Raises:
        ValueError: a size is out of range, or an unknown order.

    Example:
        >>> facts = DeviceFacts(132, 232_448, has_pdl=True, has_cluster=True)
        >>> len(candidate_plans(8, 4096, 4096, "bf16", facts))
        11
        >>> len(candidate_plans(8, 24576, 4096, "bf16", facts))
        38
    """
    if not 1 <= M <= MAX_MEDIUM_M:
        raise ValueError(f"M is {M}; the kernels take 1 .. {MAX_MEDIUM_M} tokens")
    tiles = -(-N // TILE_ROWS)
    most = token_range(M)[1]
    splits: Iterator[Split]
    if M <= MAX_SMALL_M:
        splits = _small_splits(most, tiles, K, facts)
    else:
        splits = _medium_splits(most, tiles, K, facts)
    return [
        plan_with(split, M, N, K, order, facts, quantised, reason="a candidate") for split in splits
    ]


def _small_splits(M: int, tiles: int, K: int, facts: DeviceFacts) -> Iterator[Split]:
    """Warps that share K; a CTA for each tile, or so many on an SM that walk over the tiles."""
    for shared_x, built in SMALL_WARPS.items():
        grids = {tiles, *(count * facts.sm_count for count in _CTAS_PER_SM[shared_x])}
        for warps in built:
            for grid in sorted(grid for grid in grids if grid <= tiles):
                for depth in _SMALL_DEPTHS[shared_x]:
                    split = SmallSplit(warps, grid, depth, shared_x)
                    if split.shared_bytes(M, K) <= facts.shared_bytes_per_block:
                        yield split


def _medium_splits(M: int, tiles: int, K: int, facts: DeviceFacts) -> Iterator[Split]:
    """All that fit, and whose CTAs the GPU holds at once."""
    chunks = -(-K // (2 * TILE_COLUMNS))
    for held in MEDIUM_HELD[token_groups(M)]:
        for cluster in CLUSTERS if facts.has_cluster else (1,):
            if cluster > chunks:  # some CTAs would have no part of K
                continue
            for clusters in _cluster_counts(tiles, cluster, facts.sm_count):
                for depth, x_depth in _DEPTHS:
                    split = MediumSplit(held, cluster, clusters, depth, x_depth)
                    two = M <= _MOST_TOKENS_FOR_TWO and clusters * cluster > facts.sm_count
                    per_sm = 2 if two else 1
                    fits = clusters * cluster <= per_sm * facts.sm_count
                    if fits and split.shared_bytes(M) <= room(facts.shared_bytes_per_block, per_sm):
                        yield split


def _cluster_counts(tiles: int, cluster: int, sms: int) -> list[int]:
    """How many clusters may share the tiles: all that the GPU holds, or so that each has a few."""
    full = [max(1, per_sm * sms // cluster) for per_sm in (1, 2)]
    few = [-(-tiles // each) for each in _TILES_PER_CLUSTER]
    return sorted({min(tiles, count) for count in (*full, *few) if count <= full[-1]})
