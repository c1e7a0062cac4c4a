"""How linear_large shares its work: a model of its time, and the split that it finds fastest.

Plain numbers; knows the kernel by its sizes. The kernel is built for GPUs with `has_wgmma`.

The model, in cycles of one CTA on an SM:

    waves * (stages * (1.67 max(t, i) + 0.87 min(t, i) + 43) + 8000 + 630 RT NT if K is shared)

    waves   units of work (up to 8 RT row tiles times 8 NT tokens) that a CTA takes after each other
    stages  of 64 columns, its share of K
    t       tensor cores: 16 RT NT cycles a stage
    i       instructions that decode: 2 (30 + 86 R) a stage, R the tiles that a warp really has

Its numbers are a fit to 1,168 measured splits of twelve Qwen3 matrices at M = 64 .. 4096 (one
H200, 132 SMs, 2026-11-29, bf16, CUDA graph with PDL, weights rotated through 320 MB; the program is
not kept, the plans are measured by benchmarks/linear.py). The kernel that arranges x is not in it.
9 % mean error in time. Of the splits measured it picks one that takes 0.8 % more time than the
best on average, and at worst 14 % (5120 x 8192 at M = 64). Three stages of weights gained nothing
over two. Where all units find room at once, the fewest were best (4096 x 4096 at M = 128: 32 parts
22.1 us, 66 parts 23.6); else as many as fill the last wave (34816 x 5120: 272 parts 106.7 us, 396
parts 103.2).

33 clusters of four CTAs took nearly twice the time of 28, as if the GPU did not hold them at once:
SMs come in groups that a cluster cannot span.

Kernels that arrange x on the way (direct) are not in the model. They save a launch and do its work
in every CTA. Measured as above, in us, a prototype of each with one setting for all shapes (at M =
64 with ten stages of x), in brackets what served the shape before:

    tiles  shapes (N x K)   M = 64: 2 tiles a warp,    M = 128: 1 tile a warp,
                            28 clusters of 4 CTAs      66 clusters of 2 CTAs
    256    4096 x 4096      17.6 (medium: 17.2)        26.2 (29.8)
    256    4096 x 12288     35.9 (medium: 35.2)        56.1 (57.6)
    320    5120 x 5120      21.3 (25.4)                31.5 (33.6)
    320    5120 x 8192      28.1 (34.4)                44.3 (44.2)
    320    5120 x 17408     49.7 (53.5)                79.7 (75.0)
    320    5120 x 25600     67.8 (72.8)                109.4 (102.8)
    384    6144 x 4096      20.4 (22.6)                29.7 (30.5)
    448    7168 x 5120      24.6 (25.9)                35.7 (34.5)

With other settings and more tiles they gained little or lost: at M = 64 33.6 (33.7) on 10240 x
5120, 42.3 (43.0) on 24576 x 4096, 99.0 (68.7) on 34816 x 5120. Fewer parts of the rows were slower
here (4096 x 4096 at M = 64: 28 parts 17.6, 22 parts 18.6, 19 parts 19.6).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

LARGE_HELD: Mapping[int, tuple[int, ...]] = {8: (1, 2, 3), 16: (1, 2), 24: (1,), 32: (1,)}
"""Tokens / 8 of a unit that linear_large is built for, and with each the row tiles of a warp."""

DIRECT_HELD: Mapping[int, tuple[int, ...]] = {8: (2,), 16: (1,)}
"""The same of its kernels that arrange x on the way."""

LARGE_WARPS = 8
"""Warps of linear_large that multiply."""

MIN_LARGE_M = 33
"""From here on linear_large is faster than linear_medium, where it is built, but for a few shapes
(`prefers_medium`)."""

MAX_LARGE_M = 8192
"""Most tokens of one launch, which bounds the arranged copy of x."""

_ONE_UNIT_OF_TOKENS = 128  # up to here all tokens are one unit's
_TILE_ROWS = 16
_UNIT_BYTES = 2304  # of a row tile and 256 columns
_STAGE_COLUMNS, _STAGE_BYTES = 64, 128  # of x: columns, bytes a token
_SUM_BYTES = 80  # of a row tile and token
_BARRIER_BYTES = 8
_DEPTH = 2
_X_DEPTHS = (8, 6, 5, 4)
_FULL_REGISTERS = 16  # NT * RT; with more, a whole warpgroup gives registers away
_DIRECT_WARPS = 8
_MIN_DIRECT_X_DEPTH = 4  # four pairs of warps fill the ring
_MIN_DIRECT_K = 1024  # so that four CTAs have a part each; measured from 4096 on


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
        direct: the kernel arranges x on the way; no other has to run before.
    """

    token_groups: int
    held: int
    row_units: int
    cluster: int
    clusters: int
    depth: int
    x_depth: int
    direct: bool = False

    @property
    def threads(self) -> int:
        """Of a CTA: the warps that multiply, and those that bring x."""
        if self.direct:
            return 32 * (LARGE_WARPS + _DIRECT_WARPS)
        more = 128 if self.token_groups * self.held > _FULL_REGISTERS else 32
        return 32 * LARGE_WARPS + more

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: rings, barriers, sums of a shared K."""
        x_ring = self.x_depth * self.token_groups * 8 * _STAGE_BYTES
        ring = self.depth * LARGE_WARPS * self.held * _UNIT_BYTES
        barriers = 2 * self.x_depth + LARGE_WARPS * self.depth
        before = -(-(x_ring + ring + barriers * _BARRIER_BYTES) // 128) * 128
        if self.cluster == 1:
            return before
        return before + LARGE_WARPS * self.held * self.token_groups * 8 * _SUM_BYTES


def large_split(M: int, tiles: int, K: int, sms: int, shared_bytes_per_block: int) -> LargeSplit:
    """The split of a direct kernel where the table at the top has it faster, else the one that the
    model finds fastest; the same for all M up to 64, and for 65 to 128.

    Args:
        M: tokens, 1 .. 8192.
        tiles: of 16 outputs.
        K: inputs, a multiple of 16.
        sms, shared_bytes_per_block: of the GPU.
    """
    direct = _direct_split(M, tiles, K, sms)
    if direct and direct.shared_bytes <= shared_bytes_per_block:
        return direct
    splits = large_splits(M, tiles, K, sms, shared_bytes_per_block)
    return min(splits, key=lambda split: _cycles(split, M, tiles, K))


def prefers_medium(M: int, tiles: int, sms: int) -> bool:
    """Whether linear_medium is faster.

    4096 x 4096 at M = 64: 17.2 us against 17.6 of the direct linear_large and 18.5 of the other;
    4096 x 12288: 35.2 against 35.9 and 37.8. For more tiles it is not: 5120 x 5120 22.5 against
    21.3 and 22.3.
    """
    return M <= 64 and tiles <= 2 * sms


def large_fault(split: LargeSplit, M: int, tiles: int) -> str | None:
    """What makes a split impossible on a GPU that has the kernel, if anything does."""
    if not 1 <= M <= MAX_LARGE_M:
        return f"linear_large takes 1 to {MAX_LARGE_M} tokens"
    built = DIRECT_HELD if split.direct else LARGE_HELD
    if split.held not in built.get(split.token_groups, ()):
        kernel = "direct linear_large" if split.direct else "linear_large"
        return f"{kernel} is built for {dict(built)} tokens / 8 and row tiles a warp"
    if split.cluster not in (1, 2, 4, 8):
        return f"{split.cluster} CTAs cannot form a cluster"
    if split.depth < 1:
        return "a ring has at least one stage"
    if split.x_depth < 2:  # a stage is given back when the next is being multiplied
        return "the ring of activations has at least two stages"
    if split.direct and split.x_depth < _MIN_DIRECT_X_DEPTH:
        return f"the ring of a direct kernel has at least {_MIN_DIRECT_X_DEPTH} stages"
    if not -(-tiles // (LARGE_WARPS * split.held)) <= split.row_units <= tiles:
        return f"{tiles} row tiles cannot be {split.row_units} parts of up to 8 * {split.held}"
    if split.clusters < 1:
        return "there is at least one group of CTAs"
    return None


def _direct_split(M: int, tiles: int, K: int, sms: int) -> LargeSplit | None:
    """That of the table at the top, where it is faster: a part of the rows for each cluster."""
    least_k = _MIN_DIRECT_K
    if M <= 64:
        groups, held, cluster, x_depth = 8, 2, 4, 8
        faster = tiles > 2 * sms
    elif M <= _ONE_UNIT_OF_TOKENS:
        groups, held, cluster, x_depth = 16, 1, 2, 6
        # The more K, the more there is to arrange in every CTA. With 4096 the prototype won (26 us
        # against 29.8 on 4096 x 4096), but this kernel took 31 to 54 beside other programs.
        least_k, most_k = 5120, 12_288 if tiles <= 2 * sms else 5120
        faster = sms < tiles <= 3 * sms and most_k >= K
    else:
        return None
    clusters = _slots(cluster, sms)
    if not faster or least_k > K or tiles > LARGE_WARPS * held * clusters:
        return None
    return LargeSplit(groups, held, clusters, cluster, clusters, _DEPTH, x_depth, direct=True)


def _slots(cluster: int, sms: int) -> int:
    """Clusters of so many CTAs that a GPU holds at once."""
    return max(1, sms // cluster if cluster <= 2 else sms * 7 // (8 * cluster))


def large_splits(
    M: int, tiles: int, K: int, sms: int, shared_bytes_per_block: int
) -> Iterator[LargeSplit]:
    """Those that the model compares, for each kernel and number of CTAs that share K."""
    chunks = -(-K // (4 * _STAGE_COLUMNS))
    for groups, held in _kernels(M):
        token_tiles = -(-M // (8 * groups))
        fewest = -(-tiles // (LARGE_WARPS * held))
        for cluster in (1, 2, 4, 8) if M <= _ONE_UNIT_OF_TOKENS else (1,):
            if cluster > chunks:  # some CTAs would have no part of K
                continue
            slots = _slots(cluster, sms)
            units = fewest
            waves = -(-fewest * token_tiles // slots)
            if waves > 1:  # as many as the last wave has room for
                units = max(fewest, min(waves * slots // token_tiles, tiles))
            clusters = min(slots, units * token_tiles)
            for x_depth in _X_DEPTHS:
                split = LargeSplit(groups, held, units, cluster, clusters, _DEPTH, x_depth)
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
    stage = 1.67 * max(tensor, decoding) + 0.87 * min(tensor, decoding) + 43
    once = 8000 + (630 * split.held * split.token_groups if split.cluster > 1 else 0)
    return waves * (K / _STAGE_COLUMNS / split.cluster * stage + once)
