"""CTAs that share K: how many may, and the memory for their sums (kernels/cluster_sums.cuh)."""

from __future__ import annotations

CLUSTERS = (1, 2, 4, 8)
"""CTAs that may form a cluster."""

_TILE_BYTES = 64  # float32 of 16 rows
_PADDING_BYTES = 16  # of a token, for the banks


def sums_bytes(tokens: int, tiles: int) -> int:
    """Shared memory for the sums of so many tokens and row tiles of a CTA."""
    return tokens * (tiles * _TILE_BYTES + _PADDING_BYTES)
