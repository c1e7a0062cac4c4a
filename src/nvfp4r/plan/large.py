"""How linear_large shares its work: a model of its time, and the split that it finds fastest.

Plain numbers; knows the kernel by its sizes. The kernel is built for GPUs with `has_wgmma`.

The model, in cycles of one CTA on an SM:

    waves * (stages * (1.48 max(t, i) + 0.86 min(t, i) + 148) + 6550 + 275 RT NT if K is shared)

    waves   units of work (up to 8 RT row tiles times 8 NT tokens) that a CTA takes after each other
    stages  of 64 columns, its share of K
    t       tensor cores: 16 RT NT cycles a stage and warpgroup
    i       instructions that decode: 2 (30 + 86 R) a stage, R the tiles that a warp really has

Its numbers are a fit to 360 measured splits of twelve Qwen3 matrices at M = 64 .. 4096 (one H200,
132 SMs, 2026-11-30, bf16, CUDA graph with PDL, weights rotated through 320 MB; the program is not
kept, the plans are measured by benchmarks/linear.py). The kernel that arranges x is in the times
and not in the model, as it is the same for all of them. 5 % mean error in time. Of the splits
measured it picks the fastest in most cases, and at worst one that takes 9 % more time (7168 x 5120
at M = 2048). Three stages of weights gained nothing over two. Where all units find room at once,
the fewest were best (4096 x 4096 at M = 128: 32 parts 22.1 us, 66 parts 23.6, with the version
before); else as many as fill the last wave (34816 x 5120: 272 parts 106.7 us, 396 parts 103.2).

33 clusters of four CTAs took nearly twice the time of 28, as if the GPU did not hold them at once:
SMs come in groups that a cluster cannot span.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nvfp4r.plan.sums import CLUSTERS, sums_bytes

LARGE_HELD: Mapping[int, tuple[int, ...]] = {8: (1, 2, 3), 16: (1, 2), 24: (1,), 32: (1,)}
"""Tokens / 8 of a unit that linear_large is built for, and with each the row tiles of a warp."""

LARGE_WARPS = 8
"""Warps of linear_large that multiply."""

MIN_LARGE_M = 33
"""From here on linear_large is faster than linear_medium, where it is built, but for a few shapes
(`prefers_medium`)."""

MAX_LARGE_M = 8192
"""Most tokens of one launch, which bounds the arranged copy of x."""

_ONE_UNIT_OF_TOKENS = 128  # up to here all tokens are one unit's
_MOST_THAT_SHARE_K = 256  # tokens
_TILE_ROWS = 16
_UNIT_BYTES = 2304  # of a row tile and 256 columns
_STAGE_COLUMNS, _STAGE_BYTES = 64, 128  # of x: columns, bytes a token
_STORE_BYTES = 1024  # of a warp, on the way of its tile to y
_BARRIER_BYTES = 8
_DEPTH = 2
_X_DEPTHS = (8, 6, 5, 4)
_FULL_REGISTERS = 16  # NT * RT; with more, a whole warpgroup gives registers away


@dataclass(frozen=True)
class LargeSplit:
    """How linear_large shares its work.

    Attributes:
        token_groups: tokens / 8 of a unit (NT).
        held: row tiles a warp holds at once (RT).
        row_units: parts of the row tiles, of up to 8 * held each.
        cluster: CTAs that share the K of a unit.
        clusters: groups of CTAs that take the units in turn.
        depth: stages of a warp's ring of weights.
        x_depth: stages of the ring of activations.
    """

    token_groups: int
    held: int
    row_units: int
    cluster: int
    clusters: int
    depth: int
    x_depth: int

    @property
    def threads(self) -> int:
        """Of a CTA: the warps that multiply, and those that bring x."""
        more = 128 if self.token_groups * self.held > _FULL_REGISTERS else 32
        return 32 * LARGE_WARPS + more

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: rings, barriers, and sums of a shared K or what is on
        its way to y."""
        x_ring = self.x_depth * self.token_groups * 8 * _STAGE_BYTES
        ring = self.depth * LARGE_WARPS * self.held * _UNIT_BYTES
        barriers = 2 * self.x_depth + LARGE_WARPS * self.depth
        before = -(-(x_ring + ring + barriers * _BARRIER_BYTES) // 128) * 128
        if self.cluster == 1:
            return before + LARGE_WARPS * _STORE_BYTES
        return before + sums_bytes(8 * self.token_groups, LARGE_WARPS * self.held)


def large_split(M: int, tiles: int, K: int, sms: int, shared_bytes_per_block: int) -> LargeSplit:
    """The split that the model finds fastest.

    It is the same for all M up to 64, and for 65 to 128. For 129 to 256 as many CTAs share K as
    would be best for 256, and above none do. So the bits of a row are the same for all M of such a
    range, as nothing else changes the order of its sums.

    Args:
        M: tokens, 1 .. 8192.
        tiles: of 16 outputs.
        K: inputs, a multiple of 16.
        sms, shared_bytes_per_block: of the GPU.
    """

    def best(M: int, clusters: tuple[int, ...]) -> LargeSplit:
        splits = large_splits(M, tiles, K, sms, shared_bytes_per_block, clusters)
        return min(splits, key=lambda split: _cycles(split, M, tiles, K))

    if M <= _ONE_UNIT_OF_TOKENS:
        return best(M, CLUSTERS)
    if M <= _MOST_THAT_SHARE_K:
        return best(M, (best(_MOST_THAT_SHARE_K, CLUSTERS).cluster,))
    return best(M, (1,))


def prefers_medium(M: int, tiles: int, sms: int) -> bool:
    """Whether linear_medium is faster.

    4096 x 4096 at M = 64: 14.2 us against 15.5; 4096 x 12288: 32.6 against 33.3. For more tiles it
    is not: 6144 x 4096 18.0 against 16.2, 5120 x 8192 24.9 against 24.7.
    """
    return M <= 64 and tiles <= 2 * sms


def large_fault(split: LargeSplit, M: int, tiles: int) -> str | None:
    """What makes a split impossible on a GPU that has the kernel, if anything does."""
    if not 1 <= M <= MAX_LARGE_M:
        return f"linear_large takes 1 to {MAX_LARGE_M} tokens"
    if split.held not in LARGE_HELD.get(split.token_groups, ()):
        return f"linear_large is built for {dict(LARGE_HELD)} tokens / 8 and row tiles a warp"
    if split.cluster not in CLUSTERS:
        return f"{split.cluster} CTAs cannot form a cluster"
    if split.depth < 1:
        return "a ring has at least one stage"
    if split.x_depth < 2:  # a stage is given back when the next is being multiplied
        return "the ring of activations has at least two stages"
    if not -(-tiles // (LARGE_WARPS * split.held)) <= split.row_units <= tiles:
        return f"{tiles} row tiles cannot be {split.row_units} parts of up to 8 * {split.held}"
    if split.clusters < 1:
        return "there is at least one group of CTAs"
    return None


def _slots(cluster: int, sms: int) -> int:
    """Clusters of so many CTAs that a GPU holds at once."""
    return max(1, sms // cluster if cluster <= 2 else sms * 7 // (8 * cluster))


def large_splits(
    M: int,
    tiles: int,
    K: int,
    sms: int,
    shared_bytes_per_block: int,
    clusters: tuple[int, ...],
) -> Iterator[LargeSplit]:
    """Those that the model compares, for each kernel and number of CTAs (of `clusters`) that
    share K."""
    chunks = -(-K // (4 * _STAGE_COLUMNS))
    for groups, held in _kernels(M):
        token_tiles = -(-M // (8 * groups))
        fewest = -(-tiles // (LARGE_WARPS * held))
        for cluster in clusters:
            if cluster > chunks:  # some CTAs would have no part of K
                continue
            slots = _slots(cluster, sms)
            units = fewest
            waves = -(-fewest * token_tiles // slots)
            if waves > 1:  # as many as the last wave has room for
                units = max(fewest, min(waves * slots // token_tiles, tiles))
            groups_of_ctas = min(slots, units * token_tiles)
            for x_depth in _X_DEPTHS:
                split = LargeSplit(groups, held, units, cluster, groups_of_ctas, _DEPTH, x_depth)
                if split.shared_bytes <= shared_bytes_per_block:
                    yield split
                    break


def _kernels(M: int) -> Iterator[tuple[int, int]]:
    """Tokens / 8 and row tiles a warp of what is built for M tokens."""
    if M <= 64:
        sizes: tuple[int, ...] = (8,)
    elif M <= _ONE_UNIT_OF_TOKENS:
        sizes = (16,)
    else:
        sizes = (16, 24, 32)
    for groups in sizes:
        for held in LARGE_HELD[groups]:
            yield groups, held


def _cycles(split: LargeSplit, M: int, tiles: int, K: int) -> float:
    """The model at the top."""
    units = split.row_units * -(-M // (8 * split.token_groups))
    waves = -(-units // split.clusters)
    held = -(-tiles // (split.row_units * LARGE_WARPS))
    tensor = 16 * split.held * split.token_groups
    decoding = 2 * (30 + 86 * held)
    stage = 1.48 * max(tensor, decoding) + 0.86 * min(tensor, decoding) + 148
    once = 6550 + (275 * split.held * split.token_groups if split.cluster > 1 else 0)
    return waves * (K / _STAGE_COLUMNS / split.cluster * stage + once)
