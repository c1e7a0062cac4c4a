"""How linear_medium shares its work, for 9 to 64 tokens: the rule, and the passes for up to 192.

Plain numbers; knows the kernel by its sizes.

One H200, 132 SMs, 2026-11-29, bf16, CUDA graph with PDL, weights rotated through 320 MB; 300
settings a shape by a program that is not kept. The rule is within 2 % of the best setting found,
5 % on 10240 x 5120 at M = 16 (with the version before a warp's two row tiles were spread 8 apart).
CTAs of a cluster share K; best setting and time in us at M = 16, 32, 64, as tiles a warp / CTAs of
a cluster / clusters:

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
from dataclasses import dataclass

from nvfp4r.plan.sums import CLUSTERS, sums_bytes

MIN_MEDIUM_M, MAX_MEDIUM_M = 9, 64
"""M of linear_medium, of one pass."""

MAX_KERNEL_M = 192
"""Largest M of linear_medium, in passes; above, a dense product on unpacked rows is faster. Where
linear_large is built it takes all M above 32 instead."""

MEDIUM_HELD: Mapping[int, tuple[int, ...]] = {2: (1, 2), 4: (1,), 6: (1, 2), 8: (1, 2)}
"""Tokens / 8 that linear_medium is built for, and with each the row tiles that a warp may hold."""

MEDIUM_WARPS = 8
"""Warps of linear_medium that multiply."""

MEDIUM_THREADS = 320
"""All threads of a CTA."""

_LONG_K = 8192  # from here on more CTAs share the K of a tile
_BARRIER_BYTES = 8
_UNIT_BYTES = 2304  # of a row tile and 256 columns
_TOKEN_BYTES = 528  # of x: a token's 256 columns
# (stages of weights, stages of x), the best first, if an SM shall hold two CTAs or one.
_DEPTHS_OF_TWO = ((2, 3), (2, 2))
_DEPTHS_OF_ONE = ((3, 3), (2, 3), (2, 2), (1, 2), (1, 1))


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

    def shared_bytes(self, M: int) -> int:
        """Dynamic shared memory of a CTA for M tokens: rings, barriers, sums."""
        tiles = self.held * MEDIUM_WARPS
        x_bytes = token_groups(M) * 8 * _TOKEN_BYTES
        rings = self.depth * tiles * _UNIT_BYTES + self.x_depth * x_bytes
        barriers = 2 * self.x_depth + MEDIUM_WARPS * (self.depth + 1)
        return rings + sums_bytes(M, tiles) + barriers * _BARRIER_BYTES


def medium_split(
    M: int, tiles: int, K: int, sms: int, shared_bytes_per_block: int, has_cluster: bool
) -> MediumSplit | None:
    """The first of the rule's splits that leaves an SM room for as many CTAs as it counts on.

    Args:
        M: tokens, 9 .. 64.
        tiles: of 16 outputs.
        K: inputs, a multiple of 16.
        sms, shared_bytes_per_block, has_cluster: of the GPU.

    Returns:
        None if no split fits.
    """
    for held, cluster, clusters, per_sm in _medium_shares(M, tiles, K, sms, has_cluster):
        for depth, x_depth in _DEPTHS_OF_TWO if per_sm > 1 else _DEPTHS_OF_ONE:
            split = MediumSplit(held, cluster, clusters, depth, x_depth)
            if split.shared_bytes(M) <= room(shared_bytes_per_block, per_sm):
                return split
    return None


def medium_fault(split: MediumSplit, M: int, tiles: int, has_cluster: bool) -> str | None:
    """What makes a split impossible, if anything does; memory apart."""
    if not MIN_MEDIUM_M <= M <= MAX_MEDIUM_M:
        return f"linear_medium takes {MIN_MEDIUM_M} to {MAX_MEDIUM_M} tokens"
    if split.held not in MEDIUM_HELD[token_groups(M)]:
        return f"linear_medium is built for {MEDIUM_HELD[token_groups(M)]} row tiles a warp"
    if split.cluster not in (CLUSTERS if has_cluster else (1,)):
        return f"{split.cluster} CTAs cannot form a cluster"
    if min(split.depth, split.x_depth) < 1:
        return "a ring has at least one stage"
    if not 1 <= split.clusters <= tiles:
        return f"{split.clusters} groups of CTAs cannot share {tiles} row tiles"
    return None


def token_groups(M: int) -> int:
    """Tokens / 8 of the linear_medium that takes M tokens, 9 .. 64."""
    return next(groups for groups in MEDIUM_HELD if 8 * groups >= M)


def room(shared_bytes_per_block: int, per_sm: int) -> int:
    """Dynamic shared memory that a CTA may use if an SM shall hold `per_sm` of them.

    An SM has 1,024 bytes more than a CTA may ask for, and each CTA takes so many besides its own.
    """
    return (shared_bytes_per_block + 1024) // per_sm - 1024


def _medium_shares(
    M: int, tiles: int, K: int, sms: int, has_cluster: bool
) -> Iterator[tuple[int, int, int, int]]:
    """(row tiles a warp holds, CTAs of a cluster, clusters, CTAs that an SM shall hold).

    The table at the top; then what needs less shared memory.
    """
    per_sm = 2 if M <= 32 else 1
    if has_cluster:
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
