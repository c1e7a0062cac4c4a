"""kernels/arrange.cuh, compiled for the host: where every value goes, and what happens to it there.

The same source lines that a GPU runs (tests/nvfp4r/on_host.py), against index formulas in Python.
"""

from __future__ import annotations

import struct
from itertools import product

import pytest
import torch

from nvfp4r.launches import _ARRANGE
from nvfp4r.methods.rotation import rotate
from nvfp4r.packed import pack
from nvfp4r.quantize import quantize_activations
from nvfp4r.reference import dequantize
from tests.nvfp4r.on_host import ArrangeOnHost
from tests.nvfp4r.packed_by_hand import (
    FACTORS,
    decode_scales,
    decode_word,
    half_value,
    random_matrix,
)

ROTATE, QUANTIZE = 1, 2
DTYPES = [torch.bfloat16, torch.float16]
TOKENS = [1, 7, 8, 9, 17]
COLUMNS = [16, 48, 64, 80, 192]


@pytest.fixture(scope="module")
def arrange(tmp_path_factory):
    return ArrangeOnHost(tmp_path_factory.mktemp("host"))


def arranged(x):
    """The order of kernels/arrange.cuh, value by value."""
    M, K = x.shape
    stages, groups = -(-K // 64), -(-M // 8)
    values = []
    for stage, group in product(range(stages), range(groups)):
        for j, h, token, t, e in product(range(4), range(2), range(8), range(4), range(2)):
            m, k = 8 * group + token, 64 * stage + 16 * t + 4 * j + 2 * h + e
            values.append(x[m, k] if m < M and k < K else torch.zeros((), dtype=x.dtype))
    return torch.stack(values).view(stages, groups, 512)


def numbered(M, K, dtype):
    """Every value is another: bit patterns from 1, without zero, infinities and NaN."""
    return torch.arange(1, M * K + 1, dtype=torch.int16).view(M, K).view(dtype)


def assert_same_bits(got, expected):
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", COLUMNS)
@pytest.mark.parametrize("M", TOKENS)
def test_every_value_is_where_the_formula_puts_it(arrange, M, K, dtype):
    x = numbered(M, K, dtype)
    assert_same_bits(arrange(x), arranged(x))


@pytest.mark.parametrize("ctas", [1, 2, 7])
def test_any_grid_writes_everything_once(arrange, ctas):
    x = numbered(65, 208, torch.float16)
    assert_same_bits(arrange(x, ctas=ctas), arranged(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prologue", [ROTATE, QUANTIZE, ROTATE | QUANTIZE])
@pytest.mark.parametrize("K", COLUMNS)
@pytest.mark.parametrize("M", TOKENS)
def test_a_prologue_prepares_each_block_on_its_way(arrange, M, K, prologue, dtype):
    generator = torch.Generator().manual_seed(M + K)
    x = torch.randn(M, K, generator=generator)
    x *= 10.0 ** torch.randint(-3, 2, (M, 1), generator=generator)
    x = x.to(dtype)
    scale = 0.0123 if prologue & QUANTIZE else None
    expected = rotate(x) if prologue & ROTATE else x
    if scale is not None:
        expected, _ = quantize_activations(expected, torch.tensor(scale))
    assert_same_bits(arrange(x, prologue, scale), arranged(expected.to(dtype)))


def test_a_block_that_cannot_be_quantised_is_nan_and_its_neighbours_are_not(arrange):
    x = torch.ones(9, 80).bfloat16()
    x[8, 70] = float("inf")
    expected = torch.zeros(9, 80, dtype=torch.bool)
    expected[8, 64:] = True
    got = arrange(x, QUANTIZE, 0.01)
    assert torch.equal(got.isnan(), arranged(expected.bfloat16()) == 1)


def test_the_argument_is_laid_out_as_the_source_declares_it(arrange):
    assert arrange.argument_bytes == _ARRANGE.size


@pytest.mark.parametrize("order", ["bf16", "f16"])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 16, 16), (9, 40, 80), (17, 24, 208)])
def test_what_wgmma_multiplies_is_the_product(arrange, M, N, K, order):
    """Packed weights as the registers of a warp have them, times what the descriptor finds.

    In float64, so exact: values of x and of the decoded weights have few bits.
    """
    weight = random_matrix(N, K, global_scale=1.0)
    tiles = pack(weight, order).tiles
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (M, K), generator=generator).to(DTYPES[order == "f16"])
    memory = arrange(x).double()
    stages, groups, _ = memory.shape
    _, to_half, to_group, swizzle = arrange.offsets(0)
    assert swizzle == 0
    y = torch.zeros(8 * groups, 16 * tiles.shape[0], dtype=torch.float64)
    for stage, j, tile in product(range(stages), range(4), range(tiles.shape[0])):
        stored = bytes(tiles[tile, stage // 2].tolist())
        a = torch.tensor(fragments(stored, stage % 2, j, order), dtype=torch.float64)  # [16, 16]
        flat = memory[stage].flatten()
        for group, token in product(range(groups), range(8)):
            at = [
                to_group * group + 256 * j + to_half * (slot // 8) + 16 * token + 2 * (slot % 8)
                for slot in range(16)
            ]
            b = flat[torch.tensor(at) // 2]
            y[8 * group + token, 16 * tile : 16 * tile + 16] += a @ b
    truth = x.double() @ dequantize(weight).T
    assert torch.equal(FACTORS[order] * y[:M, :N], truth)
    assert not bool(y[M:].any())
    assert not bool(y[:, N:].any())


def fragments(tile, half, j, order):
    """The 16 rows of a tile and 16 slots of k that its words number j are, decoded and scaled."""
    a = [[0.0] * 16 for _ in range(16)]
    for lane in range(32):
        g, t = lane // 4, lane % 4
        (scale_bytes,) = struct.unpack_from("<I", tile, 1024 + 4 * lane)
        scales = decode_scales(scale_bytes, half, order)
        words = struct.unpack_from("<4I", tile, 512 * half + 16 * lane)
        for register, pair in enumerate(decode_word(words[j], order)):
            lower, upper_half = register % 2, register // 2
            scale = half_value(scales >> 16 * lower & 0xFFFF, order)
            for odd in (0, 1):
                value = half_value(pair >> 16 * odd & 0xFFFF, order)
                a[g + 8 * lower][2 * t + 8 * upper_half + odd] = value * scale
    return a
