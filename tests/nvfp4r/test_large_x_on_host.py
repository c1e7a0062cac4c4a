"""`arrange_x` of kernels/large_x.cuh, compiled for the host: what a block brings into its ring.

The same source lines that a GPU runs, against kernels/arrange.cuh, which test_arrange_on_host.py
checks value by value.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nvfp4r.launches import _LARGE
from nvfp4r.plan_large import DIRECT_HELD
from tests.nvfp4r.on_host import ArrangeOnHost, LargeXOnHost

DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def arrange(tmp_path_factory):
    return ArrangeOnHost(tmp_path_factory.mktemp("arrange"))


@pytest.fixture(scope="module")
def large_x(tmp_path_factory):
    return LargeXOnHost(tmp_path_factory.mktemp("large_x"))


def numbered(M, K, dtype=torch.float16):
    """Neighbours differ; bit patterns from 1 to 30,000, none of them NaN."""
    return (torch.arange(M * K) % 30_000 + 1).to(torch.int16).view(M, K).view(dtype)


def units_of(arrange, x, groups):
    """x as kernels/arrange.cuh has it, token tile by token tile: [tiles][stages, groups, 512]."""
    values = arrange(x)
    missing = -values.shape[1] % groups
    return F.pad(values, (0, 0, 0, missing)).split(groups, dim=1)


def assert_same_bits(got, expected):
    assert torch.equal(got.view(torch.int16), expected.contiguous().view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", DIRECT_HELD)
@pytest.mark.parametrize("K", [16, 48, 64, 80, 464])
@pytest.mark.parametrize("M", [1, 7, 33, 64, 65, 128])
def test_a_ring_that_holds_all_is_x_arranged(large_x, arrange, M, K, groups, dtype):
    x = numbered(M, K, dtype)
    expected = torch.cat(units_of(arrange, x, groups))
    ring, arrivals, parities = large_x(x, groups, len(expected))
    assert_same_bits(ring, expected)
    assert arrivals == [2] * len(expected)  # of both halves
    assert parities == [1] * len(expected)  # nobody has to have used it


@pytest.mark.parametrize("groups", DIRECT_HELD)
@pytest.mark.parametrize("depth", [4, 8, 45])
def test_a_ring_is_filled_in_turn_over_all_units(large_x, arrange, depth, groups):
    """Of 15 stages each; every second of the six is this cluster's. Pairs of warps run after each
    other here, so in a ring that does not hold all, each has slots of its own."""
    x = numbered(2 * 8 * groups, 944)
    tiles = units_of(arrange, x, groups)
    expected = torch.cat([tiles[unit % 2] for unit in (0, 2, 4)])
    ring, arrivals, parities = large_x(x, groups, depth, row_units=3, clusters=2)
    for slot in range(depth):
        turns = len(range(slot, len(expected), depth))
        assert_same_bits(ring[slot], expected[slot + (turns - 1) * depth])
        assert (arrivals[slot], parities[slot]) == (2 * turns, turns % 2), slot


@pytest.mark.parametrize("groups", DIRECT_HELD)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_blocks_of_a_cluster_bring_all_of_k_once(large_x, arrange, size, groups):
    """By parts of 256 columns: with eight blocks and four such parts some bring nothing."""
    x = numbered(40, 976)
    (expected,) = units_of(arrange, x, groups)
    seen = []
    for rank in range(size):
        ring, arrivals, _ = large_x(x, groups, 16, rank=rank, size=size)
        written = sum(arrived > 0 for arrived in arrivals)
        seen.append(ring[:written])
        assert bool(ring[written:].isnan().all())
    assert_same_bits(torch.cat(seen), expected)
    assert (min(map(len, seen)) == 0) == (size == 8)


def test_the_argument_is_laid_out_as_the_source_declares_it(large_x):
    assert large_x.argument_bytes == _LARGE.size
