"""The plans of linear_large: legal on every shape, one for a range of M, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from nvfp4r.jit import kernel_sources
from nvfp4r.plan import DeviceFacts, SmallSplit, choose_plan, plan_with
from nvfp4r.plan.large import (
    LARGE_HELD,
    LARGE_WARPS,
    MAX_LARGE_M,
    MIN_LARGE_M,
    LargeSplit,
    _cycles,
    large_fault,
    large_split,
    prefers_medium,
)

H200 = DeviceFacts(
    sm_count=132, shared_bytes_per_block=232_448, has_pdl=True, has_cluster=True, has_wgmma=True
)
DEVICES = [H200, replace(H200, sm_count=78), replace(H200, sm_count=16)]  # a smaller one, a slice
QWEN3 = [
    *((4096, 4096), (4096, 12288), (6144, 4096), (24576, 4096)),
    *((5120, 5120), (5120, 8192), (5120, 17408), (5120, 25600)),
    *((7168, 5120), (10240, 5120), (34816, 5120), (51200, 5120)),
]
TOKENS = [33, 48, 64, 65, 100, 128, 129, 192, 193, 256, 257, 511, 1024, 1025, 4097, 8192]


def tiles_of(N):
    return -(-N // 16)


def parts(split, tiles):
    """First tile and number of tiles of every part, as kernels/linear_large.cuh divides them."""
    borders = [tiles * i // split.row_units for i in range(split.row_units + 1)]
    return [(first, last - first) for first, last in pairwise(borders)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("K", [16, 48, 256, 272, 448, 3696, 25_600])
@pytest.mark.parametrize("N", [1, 8, 24, 1000, 4096, 51_200, 151_936])
def test_every_shape_has_a_legal_plan(N, K, device):
    tiles = tiles_of(N)
    for M in TOKENS:
        if prefers_medium(M, tiles, device.sm_count):
            continue
        plan = choose_plan(M, N, K, "f16", device)
        split = plan.split
        assert (plan.path, plan.passes, plan.pdl) == ("large", 1, True)
        assert large_fault(split, M, tiles) is None
        assert plan.kernel == f"linear_large_f16_n{split.token_groups}_r{split.held}"
        assert (plan.cluster, plan.depth, plan.x_depth) == (
            *(split.cluster, split.depth, split.x_depth),
        )
        assert plan.threads == split.threads <= 1024
        assert plan.shared_bytes == split.shared_bytes <= device.shared_bytes_per_block
        assert plan.grid == split.clusters * split.cluster
        # One CTA on an SM; none without work, neither units nor a part of K.
        assert split.cluster <= plan.grid <= max(device.sm_count, split.cluster)
        units = split.row_units * -(-M // (8 * split.token_groups))
        assert split.clusters <= units
        assert split.cluster <= -(-K // 256)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("N", [1, 24, 1000, 4096, 5136, 151_936])
def test_parts_cover_every_tile_once(N, device):
    tiles = tiles_of(N)
    for M in TOKENS:
        split = large_split(M, tiles, 3696, device.sm_count, device.shared_bytes_per_block)
        at = 0
        for first, count in parts(split, tiles):
            assert first == at
            assert 1 <= count <= LARGE_WARPS * split.held
            at += count
        assert at == tiles


@pytest.mark.parametrize(("groups", "held"), [(8, 1), (8, 3), (16, 2), (32, 1)])
@pytest.mark.parametrize("cluster", [1, 4])
@pytest.mark.parametrize(("depth", "x_depth"), [(1, 4), (2, 5), (3, 8)])
def test_shared_memory_holds_what_the_kernel_puts_there(groups, held, cluster, depth, x_depth):
    """Addresses as kernels/linear_large.cuh works them out."""
    split = LargeSplit(groups, held, 1, cluster, 1, depth, x_depth)
    full = x_depth * groups * 1024 + depth * LARGE_WARPS * held * 2304
    weights_full = full + 8 * x_depth + 8 * x_depth
    end = (weights_full + 8 * LARGE_WARPS * depth + 127) & ~127
    if cluster > 1:
        end += 8 * groups * (16 * LARGE_WARPS * held + 4) * 4  # kTokenSums
    else:
        end += LARGE_WARPS * 1024  # kStoreBytes
    assert split.shared_bytes == end


@pytest.mark.parametrize("sms", range(1, 133))
def test_any_number_of_sms_has_a_legal_plan(sms):
    device = replace(H200, sm_count=sms)
    for M in (33, 64, 65, 128, 129, 256):
        for tiles in (1, sms + 1, 2 * sms, 2 * sms + 1, 3 * sms, 3 * sms + 1, 4 * sms):
            choose_plan(M, 16 * tiles, 4096, "bf16", device)


@pytest.mark.parametrize(("first", "last"), [(33, 64), (65, 128)])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_get_the_same_plan_within_a_range_of_m(device, first, last):
    """So that the bits of a row do not depend on its neighbours (K7)."""
    for N, K in [*QWEN3, (8, 16), (1000, 3696)]:
        if prefers_medium(last, tiles_of(N), device.sm_count):
            continue  # whose ranges are narrower (test_plan.py)
        plans = {choose_plan(M, N, K, "bf16", device) for M in range(first, last + 1)}
        assert len(plans) == 1
        assert plans.pop().path == "large"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("N", [8, 4096, 51_200])
@pytest.mark.parametrize("K", [16, 3696, 12_288, 25_600])
def test_above_128_tokens_the_order_of_sums_depends_on_the_range_alone(N, K, device):
    """As many CTAs share K for 129 to 256 tokens, and none do above, whatever else the plan is."""

    def shared(tokens):
        return {choose_plan(M, N, K, "bf16", device).cluster for M in tokens}

    assert len(shared(range(129, 257))) == 1
    assert shared(range(257, 1200, 50)) == {1}


def test_few_ctas_share_k_for_256_tokens_on_an_h200():
    assert choose_plan(256, 4096, 12_288, "bf16", H200).cluster > 1
    assert choose_plan(256, 51_200, 5120, "bf16", H200).cluster == 1


@pytest.mark.parametrize("N", [16, 4096, 4224, 4240, 51_200])
def test_the_border_to_the_other_kernels(N):
    medium = prefers_medium(64, tiles_of(N), H200.sm_count)
    assert choose_plan(MIN_LARGE_M - 1, N, 4096, "bf16", H200).path == "medium"
    for M in (MIN_LARGE_M, 64):
        assert choose_plan(M, N, 4096, "bf16", H200).path == ("medium" if medium else "large")
    assert choose_plan(65, N, 4096, "bf16", H200).path == "large"
    without = replace(H200, has_wgmma=False)
    paths = [choose_plan(M, N, 4096, "bf16", without).path for M in (33, 192, 193)]
    assert paths == ["medium", "medium", "unpack"]


def test_a_matrix_keeps_its_kernel_from_33_to_64_tokens():
    for sms in (16, 132):
        for tiles in (1, 2 * sms, 2 * sms + 1, 10_000):
            assert len({prefers_medium(M, tiles, sms) for M in range(33, 65)}) == 1
            assert not any(prefers_medium(M, tiles, sms) for M in (65, 128, 8192))


@pytest.mark.parametrize(
    ("M", "passes", "part"),
    [(MAX_LARGE_M, 1, 8192), (8193, 2, 4097), (16_384, 2, 8192), (16_385, 3, 5462)],
)
def test_more_tokens_take_equal_passes(M, passes, part):
    plan = choose_plan(M, 4096, 4096, "bf16", H200)
    once = choose_plan(part, 4096, 4096, "bf16", H200)
    assert plan.passes == passes
    assert plan.split == once.split
    assert M - (passes - 1) * part > 128  # the last pass, too, has a plan that shares no K


def test_what_is_done_to_x_does_not_change_the_plan():
    """It happens before: in the kernel that arranges x, or for linear_medium in one of its own."""
    for N, K in QWEN3:
        for M in TOKENS:
            plan = choose_plan(M, N, K, "bf16", H200, quantised=True)
            assert plan.apart == (plan.path == "medium")
            assert replace(plan, apart=False) == choose_plan(M, N, K, "bf16", H200)


def modelled(M, N, K, device=H200):
    split = large_split(M, tiles_of(N), K, device.sm_count, device.shared_bytes_per_block)
    return _cycles(split, M, tiles_of(N), K)


@pytest.mark.parametrize(("N", "K"), QWEN3)
def test_more_work_never_takes_less_time_by_the_model(N, K):
    tokens = [*range(33, 600, 7), *range(600, MAX_LARGE_M, 331)]
    assert_ascending([modelled(M, N, K) for M in tokens])
    for M in (64, 128, 512):
        assert_ascending([modelled(M, N, k) for k in range(256, 8192, 256)])
        assert_ascending([modelled(M, n, K) for n in range(16, 8192, 176)])


def assert_ascending(times):
    assert all(before <= after * (1 + 1e-9) for before, after in pairwise(times))


def test_what_the_rule_picks_is_built():
    """For Qwen3's matrices and all else: LARGE_HELD is what nvfp4r.cu lists."""
    listed = re.findall(r"LARGE\(NAME, MODE, (\d+), (\d)\)", kernel_sources()["nvfp4r.cu"])
    assert {(int(groups), int(held)) for groups, held in listed} == {
        (groups, held) for groups, helds in LARGE_HELD.items() for held in helds
    }
    kernels = {f"linear_large_bf16_n{groups}_r{held}" for groups, held in listed}
    for N, K in QWEN3:
        for M in TOKENS:
            plan = choose_plan(M, N, K, "bf16", H200)
            assert plan.path == "medium" or plan.kernel in kernels


GOOD = LargeSplit(
    token_groups=8, held=2, row_units=2, cluster=2, clusters=2, depth=2, x_depth=4
)  # of 16 tiles


@pytest.mark.parametrize("M", [1, 8, 33, 65, MAX_LARGE_M])
def test_a_split_may_serve_any_number_of_tokens(M):
    assert plan_with(GOOD, M, 256, 512, "bf16", H200, reason="").split == GOOD


@pytest.mark.parametrize(
    ("M", "changes", "fault"),
    [
        (MAX_LARGE_M + 1, {}, "linear_large takes 1 to 8192 tokens"),
        (64, {"token_groups": 12}, r"linear_large is built for \{8: \(1, 2, 3\), 16: "),
        (64, {"held": 4}, "linear_large is built for"),
        (64, {"token_groups": 32}, "linear_large is built for"),  # with one tile a warp alone
        (64, {"cluster": 3}, "3 CTAs cannot form a cluster"),
        (64, {"cluster": 16}, "16 CTAs cannot form a cluster"),
        (64, {"depth": 0}, "a ring has at least one stage"),
        (64, {"x_depth": 1}, "the ring of activations has at least two stages"),
        (64, {"row_units": 0}, "16 row tiles cannot be 0 parts of up to 8 [*] 2"),
        (64, {"row_units": 1, "held": 1}, "16 row tiles cannot be 1 parts of up to 8 [*] 1"),
        (64, {"row_units": 17}, "16 row tiles cannot be 17 parts of up to 8 [*] 2"),
        (64, {"clusters": 0}, "there is at least one group of CTAs"),
        (64, {"x_depth": 40}, "bytes of shared memory, a CTA has 232448"),
    ],
)
def test_impossible_splits_are_refused(M, changes, fault):
    with pytest.raises(ValueError, match=fault):
        plan_with(replace(GOOD, **changes), M, 256, 512, "bf16", H200, reason="")


def test_a_gpu_without_wgmma_is_refused():
    without = replace(H200, has_wgmma=False)
    with pytest.raises(ValueError, match=r"built for GPUs of compute capability 9\.0"):
        plan_with(GOOD, 64, 256, 512, "bf16", without, reason="")


def test_the_other_kernels_stay_for_few_tokens_where_wgmma_is():
    assert isinstance(choose_plan(8, 4096, 4096, "bf16", H200).split, SmallSplit)


@pytest.mark.parametrize("M", [33, 64, 65, 128, 129, 1000, 8192])
@pytest.mark.parametrize(("N", "K"), [(10240, 5120), (4240, 48), (5120, 5120)])
def test_a_plan_comes_back_from_its_own_split(M, N, K):
    plan = choose_plan(M, N, K, "f16", H200)
    assert plan_with(plan.split, M, N, K, "f16", H200, reason=plan.reason) == plan
