"""Where packed weights keep what: every bit where docs/layout.md puts it, and back again."""

from __future__ import annotations

import math

import pytest
import torch

from nvfp4r import reference
from nvfp4r.format import NVFP4Tensor, row_chunks
from nvfp4r.packed import pack, pack_, unpack
from tests.nvfp4r.packed_by_hand import (
    DTYPES,
    FACTORS,
    ORDERS,
    assert_same_matrix,
    documented_tiles,
    e5m3,
    kernel_products,
    matrix,
    random_matrix,
)

SHAPES = [(8, 16), (24, 48), (16, 128), (40, 144), (130, 448)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_every_byte_is_where_the_document_puts_it(N, K, order):
    weight = random_matrix(N, K)
    packed = pack(weight, order)
    assert torch.equal(packed.tiles, documented_tiles(weight, order))
    assert_same_matrix(unpack(packed), weight)


@pytest.mark.parametrize("order", ORDERS)
def test_code_bits_are_a_permutation(order):
    """Fifteen matrices give every bit of the tiles the number of the code bit that it holds.

    Thirteen set whole codes by one bit of their position, two set one half of the bits of all.
    """
    N, K = 32, 256
    scale_bytes = torch.full((N, K // 16), 0x38)
    position = torch.arange(N * K).view(N, K)
    sources = [15 * (position >> b & 1) for b in range(13)]
    sources += [torch.full((N, K), 0b1010), torch.full((N, K), 0b1100)]
    held = torch.zeros(2 * 2 * 1024, 8, dtype=torch.int64)
    for digit, codes in enumerate(sources):
        tiles = pack(matrix(codes, scale_bytes), order).tiles
        bits = tiles[..., :1024].reshape(-1, 1).int() >> torch.arange(8) & 1
        held += bits << (digit + 2 if digit < 13 else digit - 13)
    assert torch.equal(held.flatten().sort().values, torch.arange(4 * N * K))


def test_scale_bytes_are_a_permutation():
    """Two matrices whose block scales are the two digits of their position, base 32."""
    N, K = 32, 256
    position = torch.arange(N * K // 16).view(N, K // 16)
    codes = torch.full((N, K), 2)
    number = torch.zeros(4 * 128, dtype=torch.int64)
    digit_of = {e5m3(0x20 + digit): digit for digit in range(32)}
    for power, digit in ((1, position % 32), (32, position // 32)):
        tiles = pack(matrix(codes, 0x20 + digit), "f16").tiles
        number += power * torch.tensor([digit_of[b] for b in tiles[..., 1024:].flatten().tolist()])
    assert torch.equal(number.sort().values, torch.arange(4 * 128))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(4))
def test_random_matrices_come_back(seed, order):
    weight = random_matrix(32, 256, seed=seed)
    assert_same_matrix(unpack(pack(weight, order)), weight)


@pytest.mark.parametrize("order", ORDERS)
def test_k2_k3_every_code_and_scale_decodes_exactly(order):
    """16 codes in every place of a word, over all 127 scales; over scale 0 the two zeros."""
    rows, columns = torch.arange(16).view(-1, 1), torch.arange(127 * 16).view(1, -1)
    codes = (rows + columns) % 16
    scale_bytes = (torch.arange(127).view(1, -1) + 5 * rows) % 127
    codes[(scale_bytes == 0).repeat_interleave(16, 1)] &= 8
    weight = matrix(codes, scale_bytes)
    products = kernel_products(pack(weight, order).tiles, order)[:, : 127 * 16]
    assert torch.equal(products.to(DTYPES[order]).double(), products)  # nothing to round

    decoded = products * FACTORS[order]
    truth = reference.dequantize(weight)
    assert torch.equal(decoded, truth)
    assert torch.equal(decoded.signbit(), truth.signbit())
    pairs = set(
        zip(
            codes.flatten().tolist(),
            scale_bytes.repeat_interleave(16, 1).flatten().tolist(),
            strict=True,
        )
    )
    assert len(pairs) == 126 * 16 + 2


def test_every_legal_scale_has_its_own_byte_and_others_are_refused():
    legal = {e5m3(byte): byte for byte in range(0x7F)}
    assert len(legal) == 0x7F
    packed = pack(matrix(torch.zeros(1, 16), torch.zeros(1, 1)), "f16")
    for byte in range(256):
        packed.tiles[0, 0, 1024] = byte
        if byte in legal:
            assert unpack(packed).block_scale.view(torch.uint8).item() == legal[byte]
        else:
            with pytest.raises(ValueError, match=r"1 of 1 scale bytes .* no E4M3 number"):
                unpack(packed)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_a7_padding_is_zero_and_never_read_back(N, K, order):
    """Whatever lies beside the source or in the target's memory; then with ones in all padding."""
    weight = random_matrix(N, K)
    beside = torch.full((N + 3, K), 0xFF, dtype=torch.uint8)
    codes, scale_bytes = beside[:N, : K // 2], beside.clone()[:N, : K // 16]
    codes.copy_(weight.codes)
    scale_bytes.copy_(weight.block_scale.view(torch.uint8))
    sliced = NVFP4Tensor(codes, scale_bytes.view(torch.float8_e4m3fn), weight.global_scale)
    assert not sliced.codes.is_contiguous()

    packed = pack(weight, order)
    packed.tiles.fill_(0xFF)
    packed.alpha.fill_(math.nan)
    pack_(packed, sliced)
    assert torch.equal(packed.tiles, documented_tiles(weight, order))
    assert torch.equal(packed.alpha, torch.full((N,), 0.5))

    used = pack(matrix(torch.full((N, K), 15), torch.full((N, K // 16), 0x38)), order).tiles
    used[..., 1024:][used[..., 1024:] != 0] = 0xFF
    packed.tiles.bitwise_or_(~used)
    assert_same_matrix(unpack(packed), weight)


def test_a_matrix_of_several_chunks_is_its_row_tiles_one_by_one():
    weight = random_matrix(1000, 1040)
    assert len(list(row_chunks(63, 9 * 16 * 128))) > 2
    packed = pack(weight, "f16")
    for i, start in enumerate(range(0, 1000, 16)):
        rows = slice(start, start + 16)
        part = NVFP4Tensor(weight.codes[rows], weight.block_scale[rows], weight.global_scale)
        assert torch.equal(packed.tiles[i : i + 1], pack(part, "f16").tiles)
    assert_same_matrix(unpack(packed), weight)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("N", "K"), [*SHAPES, (4100, 1040)])
def test_a_gpu_packs_the_same_bytes(N, K, order):
    weight = random_matrix(N, K)
    packed = pack(weight.to("cuda"), order)
    expected = pack(weight, order)
    assert packed.device.type == "cuda"
    assert torch.equal(packed.tiles.cpu(), expected.tiles)
    assert torch.equal(packed.alpha.cpu(), expected.alpha)
    assert_same_matrix(unpack(packed).to("cpu"), weight)
