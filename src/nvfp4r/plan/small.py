"""How linear_small and linear_shared share their work, for up to 8 tokens: the rules.

Plain numbers. One H200, 132 SMs, 2026-11-29, bf16, CUDA graph with PDL, weights rotated through
320 MB; sweeps of grids, warps and depths with programs that are not kept; the resulting plans are
measured by benchmarks/linear.py. Times in us.

linear_small: 6 CTAs of 4 warps, 3 of 8 or 2 of 12 fit on an SM. Best at M = 1, and how much worse
the next choice is:

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

linear_shared against it, best settings of each in one run, M = 1 / 2 / 4 / 8:

    tiles  shape           linear_small              linear_shared             best, M = 1, 2
    256    4096 x 4096     5.1 / 5.2 / 5.2 / 6.0     4.4 / 4.6 / 5.2 / 6.5     W 12, 1 a SM, depth 3
    256    4096 x 12288    10.3 / 10.5 / 10.8 / 11.6 9.9 / 10.7 / 11.9 / 20.6  the same
    320    5120 x 5120     6.7 / 6.7 / 6.8 / 7.3     6.7 / 7.4 / 7.9 / 9.0     -
    384    6144 x 4096     6.7 / 7.2 / 7.3 / 7.9     6.2 / 6.3 / 6.8 / 8.0     W 12, 1 a SM, 3
    448    7168 x 5120     8.4 / 8.6 / 8.7 / 9.2     7.9 / 8.3 / 9.5 / 10.4    W 12, 2 a SM, 2
    640    10240 x 5120    11.2 / 11.3 / 11.3 / 12.0 10.5 / 10.5 / 11.4 / 12.8 W 12, 1 a SM, 3
    1536   24576 x 4096    17.6 / 17.9 / 18.0 / 18.9 16.3 / 16.6 / 17.7 / 20.3 W 4, 4 a SM, 3
    2176   34816 x 5120    29.2 / 29.7 / 29.9 / 30.9 28.6 / 28.5 / 29.8 / 32.3 W 12, 2 a SM, 3
    3200   51200 x 5120    42.7 / 42.7 / 43.6 / 45.6 39.2 / 40.3 / 41.7 / 44.7 the same

K of 8192 and more: linear_small, by 1 to 20 %.

x that has to be prepared (benchmarks/prologue.py): rounding it on the way into shared memory, once
a CTA, costs 0.7 to 2.2 us at M = 1 with 12 warps, a kernel before 0.8 to 6.7 (less on three of six
shapes, by up to 1.1 us); with 4 warps, and for more tokens, the kernel before is faster (M = 4,
6144 x 4096: 3.8 against 1.9 us).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nvfp4r.plan.medium import room

MAX_SMALL_M = 8
"""Largest M of linear_small and linear_shared: the tokens of one matrix instruction."""

SMALL_WARPS: Mapping[bool, tuple[int, ...]] = {False: (4, 8, 12), True: (4, 12)}
"""Warps that share K: what linear_small is built for, and (True) linear_shared."""

_MAX_SHARED_M = 2  # up to here linear_shared is faster
_MAX_SHARED_K = 5120
_PREPARING_WARPS = 12
_LONG_K = 8192  # from here on more warps share the K of a tile
_TILE_ROWS, _TILE_COLUMNS = 16, 128
_UNIT_BYTES = 2304  # of a row tile and 256 columns
_TOKEN_BYTES = 528  # of x: a token's 256 columns
_SUM_BUFFERS = 4
_BARRIER_BYTES = 8


@dataclass(frozen=True)
class SmallSplit:
    """How linear_small or linear_shared shares its work.

    Attributes:
        warps: that share K.
        grid: CTAs that share the row tiles.
        depth: stages of the ring of weights.
        shared_x: linear_shared, which keeps x in shared memory.
    """

    warps: int
    grid: int
    depth: int = 2
    shared_x: bool = False

    @property
    def threads(self) -> int:
        """Of a CTA: the warps that multiply, one that copies and one that finishes sums."""
        return 32 * (self.warps + (2 if self.shared_x else 1))

    def shared_bytes(self, M: int, K: int) -> int:
        """Dynamic shared memory of a CTA: ring, barriers, sums, x."""
        ring = self.depth * (self.warps * _UNIT_BYTES + 2 * _BARRIER_BYTES)
        sums = self.warps * _TILE_ROWS * M * 4
        if not self.shared_x:
            return ring + 2 * sums
        units = -(-K // (2 * _TILE_COLUMNS * self.warps)) * self.warps
        barriers = 2 * _SUM_BUFFERS * _BARRIER_BYTES
        return units * M * _TOKEN_BYTES + ring + barriers + _SUM_BUFFERS * sums


def small_split(M: int, tiles: int, K: int, sms: int, shared_bytes_per_block: int) -> SmallSplit:
    """The rule's split.

    Args:
        M: tokens, 1 .. 8; the same split for 1 and 2, and for 3 to 8.
        tiles: of 16 outputs.
        K: inputs, a multiple of 16.
        sms, shared_bytes_per_block: of the GPU.
    """
    if M <= _MAX_SHARED_M and K <= _MAX_SHARED_K:
        split = _shared_split(tiles, sms)
        if split:
            per_sm = -(-split.grid // sms)  # CTAs that an SM shall hold
            if split.shared_bytes(_MAX_SHARED_M, K) <= room(shared_bytes_per_block, per_sm):
                return split
    if tiles <= 2 * sms and K > _LONG_K:
        return SmallSplit(12, tiles)
    if tiles <= 3 * sms:
        return SmallSplit(8, tiles)
    if tiles <= 4 * sms:
        return SmallSplit(12, 2 * sms)
    if tiles <= 6 * sms:
        return SmallSplit(4, tiles)
    return SmallSplit(4, 6 * sms)


def prepares_on_the_way(split: SmallSplit) -> bool:
    """Whether x is best prepared by the kernel itself; else by one before."""
    return split.shared_x and split.warps >= _PREPARING_WARPS


def _shared_split(tiles: int, sms: int) -> SmallSplit | None:
    """For linear_shared, if it is faster."""
    if tiles > 12 * sms:
        return SmallSplit(12, 2 * sms, 3, True)
    if tiles > 8 * sms:
        return SmallSplit(4, 4 * sms, 3, True)
    if 3 * sms < tiles <= 4 * sms:
        return SmallSplit(12, 2 * sms, 2, True)
    if 2 * sms < tiles <= 2.5 * sms:
        return None
    return SmallSplit(12, min(tiles, sms), 3, True)


def small_fault(split: SmallSplit, M: int, tiles: int) -> str | None:
    """What makes a split impossible, if anything does; memory apart."""
    if M > MAX_SMALL_M:
        return f"linear_small takes up to {MAX_SMALL_M} tokens"
    if split.warps not in SMALL_WARPS[split.shared_x]:
        name = "linear_shared" if split.shared_x else "linear_small"
        return f"{name} is built for {SMALL_WARPS[split.shared_x]} warps"
    if split.depth < 1:
        return "a ring has at least one stage"
    if not 1 <= split.grid <= tiles:
        return f"{split.grid} groups of CTAs cannot share {tiles} row tiles"
    return None
