"""The 128x4 order of block scales: a bijection onto padded tiles, with the documented offsets."""

import pytest
import torch

from nvfp4r.layout import padded_block_scale_shape, swizzle_block_scale, unswizzle_block_scale

SHAPES = [(128, 64), (130, 80), (1, 16), (127, 48), (129, 64), (256, 4096), (300, 3696), (33, 240)]


def numbered(N, K):
    """Every scale is its own index, from 1, so that 0 is padding."""
    return torch.arange(1, N * (K // 16) + 1, dtype=torch.int32).view(N, K // 16)


def offset(n, b, blocks_padded):
    tile = (n // 128) * (blocks_padded // 4) + b // 4
    return tile * 512 + (n % 32) * 16 + (n % 128 // 32) * 4 + b % 4


def test_a6_padded_scales_round_trip():
    generator = torch.Generator().manual_seed(0)
    scales = torch.randint(0, 0x7F, (130, 5), dtype=torch.uint8, generator=generator)
    swizzled = swizzle_block_scale(scales.view(torch.float8_e4m3fn))
    assert swizzled.shape == (256, 8)
    assert swizzled.dtype == torch.float8_e4m3fn
    back = unswizzle_block_scale(swizzled, N=130, K=80)
    assert back.shape == (130, 5)
    assert torch.equal(back.view(torch.uint8), scales)


@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_swizzle_is_a_bijection_onto_the_documented_offsets(N, K):
    scales = numbered(N, K)
    swizzled = swizzle_block_scale(scales)
    rows_padded, blocks_padded = padded_block_scale_shape(N, K // 16)
    assert swizzled.shape == (rows_padded, blocks_padded)
    assert rows_padded % 128 == 0
    assert blocks_padded % 4 == 0
    assert rows_padded - N < 128
    assert blocks_padded - K // 16 < 4

    rows = torch.arange(N).view(-1, 1)
    blocks = torch.arange(K // 16).view(1, -1)
    offsets = offset(rows, blocks, blocks_padded)
    flat = swizzled.flatten()
    assert torch.equal(flat[offsets], scales)
    assert offsets.unique().numel() == scales.numel()
    is_padding = torch.ones_like(flat, dtype=torch.bool)
    is_padding[offsets.flatten()] = False
    assert (flat[is_padding] == 0).all()
    assert torch.equal(unswizzle_block_scale(swizzled, N, K), scales)


@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_padding_is_never_read_back(N, K):
    scales = numbered(N, K)
    swizzled = swizzle_block_scale(scales)
    poisoned = torch.where(swizzled == 0, -1, swizzled)
    assert torch.equal(unswizzle_block_scale(poisoned.flatten(), N, K), scales)


def test_a_sliced_matrix_is_swizzled_like_its_copy():
    columns = numbered(130, 160)[:, ::2]
    assert not columns.is_contiguous()
    assert torch.equal(swizzle_block_scale(columns), swizzle_block_scale(columns.contiguous()))


@pytest.mark.parametrize("shape", [(4,), (2, 4, 4), (0, 4)])
def test_swizzle_refuses_other_shapes(shape):
    with pytest.raises(ValueError, match=r"block_scale: got shape .*, need \[N, K/16\]"):
        swizzle_block_scale(torch.zeros(shape, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("N", "K", "message"),
    [
        (130, 80, r"got 1024 elements, need 256 x 8 \(N=130, K=80"),
        (0, 80, "got N=0"),
        (128, 24, "K a positive multiple of 16"),
    ],
)
def test_unswizzle_refuses_sizes_that_do_not_belong(N, K, message):
    with pytest.raises(ValueError, match=message):
        unswizzle_block_scale(torch.zeros(1024, dtype=torch.uint8), N, K)
