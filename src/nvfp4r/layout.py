"""Orders in which block scales lie in memory for other people's kernels.

Checkpoints and NVFP4Tensor keep block scales row-major, [N, K/16]. CUTLASS and FlashInfer read them
in tiles of 128 rows x 4 blocks (512 bytes), rows and blocks padded to whole tiles. With B the
padded number of blocks per row, the scale of row n and block b lies at offset

    ((n // 128) * (B // 4) + b // 4) * 512 + (n % 32) * 16 + (n % 128 // 32) * 4 + b % 4

These functions move elements and look at none of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_ROWS = 128
TILE_BLOCKS = 4


def padded_block_scale_shape(N: int, blocks: int) -> tuple[int, int]:
    """(rows, blocks per row) after padding [N, K/16] scales to whole 128x4 tiles."""
    return -(-N // TILE_ROWS) * TILE_ROWS, -(-blocks // TILE_BLOCKS) * TILE_BLOCKS


def swizzle_block_scale(block_scale: Tensor) -> Tensor:
    """Block scales in 128x4 tiles; padding is zero.

    Args:
        block_scale: [N, K/16] of any dtype, row-major, not empty.

    Returns:
        [ceil(N/128)*128, ceil(K/64)*4] of the same dtype, contiguous: the bytes in tile order. The
        shape tells the padded size only; row i of it is not row i of the matrix.

    Raises:
        ValueError: not two dimensions, or empty. In particular, scales that were swizzled before
            cannot be recognised: keep them row-major until the last moment.
    """
    if block_scale.ndim != 2 or block_scale.numel() == 0:
        raise ValueError(
            f"block_scale: got shape {list(block_scale.shape)}, need [N, K/16], not empty"
        )
    N, blocks = block_scale.shape
    rows_padded, blocks_padded = padded_block_scale_shape(N, blocks)
    padded = torch.zeros(
        (rows_padded, blocks_padded), dtype=block_scale.dtype, device=block_scale.device
    )
    padded[:N, :blocks] = block_scale
    tiles = padded.view(rows_padded // TILE_ROWS, 4, 32, blocks_padded // TILE_BLOCKS, TILE_BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows_padded, blocks_padded)


def unswizzle_block_scale(swizzled: Tensor, N: int, K: int) -> Tensor:
    """Inverse of `swizzle_block_scale`; padding is dropped unread.

    Args:
        swizzled: as many elements as the padded scales have, any shape and dtype, contiguous.
        N: output rows of the matrix.
        K: input columns of the matrix, a multiple of 16.

    Returns:
        [N, K/16] of the same dtype, contiguous.

    Raises:
        ValueError: N or K is not positive, K is no multiple of 16, or the number of elements does
            not belong to them.
    """
    if N < 1 or K < 1 or K % 16:
        raise ValueError(f"got N={N}, K={K}, need N >= 1 and K a positive multiple of 16")
    blocks = K // 16
    rows_padded, blocks_padded = padded_block_scale_shape(N, blocks)
    if swizzled.numel() != rows_padded * blocks_padded:
        raise ValueError(
            f"swizzled block_scale: got {swizzled.numel()} elements, need {rows_padded} x "
            f"{blocks_padded} (N={N}, K={K}, padded to {TILE_ROWS} x {TILE_BLOCKS} tiles)"
        )
    tiles = swizzled.reshape(
        rows_padded // TILE_ROWS, blocks_padded // TILE_BLOCKS, 32, 4, TILE_BLOCKS
    )
    rows = tiles.permute(0, 3, 2, 1, 4).reshape(rows_padded, blocks_padded)
    return rows[:N, :blocks].contiguous()
