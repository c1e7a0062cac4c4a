"""The plan: legal on every shape, equal to the measured choice on the shapes it was measured on.

test_small.py has more of up to 8 tokens, test_large.py is about linear_large.
"""

from dataclasses import replace
from itertools import pairwise

import pytest

from nvfp4r.plan import (
    TOKEN_RANGES,
    DeviceFacts,
    choose_plan,
    even_shared_bytes,
    plan_with,
    token_range,
)
from nvfp4r.plan.medium import MAX_MEDIUM_M, MediumSplit

H200 = DeviceFacts(sm_count=132, shared_bytes_per_block=232_448, has_pdl=True, has_cluster=True)
RTX_3090 = DeviceFacts(
    sm_count=82, shared_bytes_per_block=101_376, has_pdl=False, has_cluster=False
)

QWEN3 = [
    *((4096, 4096), (4096, 12288), (5120, 5120), (5120, 25600), (6144, 4096)),
    *((7168, 5120), (10240, 5120), (24576, 4096), (51200, 5120)),
]

MEASURED_MEDIUM = [  # M, N, K, row tiles a warp, CTAs of a cluster, clusters
    (16, 4096, 4096, 1, 4, 43),
    (16, 5120, 25600, 2, 8, 27),
    (16, 24576, 4096, 1, 1, 256),
    (16, 51200, 5120, 2, 1, 264),
    (32, 5120, 25600, 1, 4, 54),
    (32, 7168, 5120, 1, 4, 56),
    (32, 10240, 5120, 1, 2, 107),
    (32, 51200, 5120, 1, 1, 264),
    (64, 4096, 12288, 1, 2, 64),
    (64, 5120, 17408, 2, 4, 20),
    (64, 10240, 5120, 2, 2, 46),
    (64, 24576, 4096, 2, 1, 96),
]


@pytest.mark.parametrize(("M", "N", "K", "held", "cluster", "clusters"), MEASURED_MEDIUM)
def test_measured_shapes_for_more_tokens(M, N, K, held, cluster, clusters):
    plan = choose_plan(M, N, K, "f16", H200)
    assert plan.kernel == f"linear_medium_f16_n{M // 8}_r{held}"
    assert (plan.cluster, plan.grid) == (cluster, cluster * clusters)


@pytest.mark.parametrize("device", [H200, RTX_3090])
@pytest.mark.parametrize("order", ["bf16", "f16"])
@pytest.mark.parametrize("M", [1, 2, 7, 8, 9, 16, 17, 32, 33, 48, 49, 64])
@pytest.mark.parametrize("N", [1, 8, 24, 1000, 1024, 4096, 151_936])
@pytest.mark.parametrize("K", [16, 48, 64, 192, 448, 3696, 25_600])
def test_every_small_shape_has_a_legal_plan(device, order, M, N, K):
    plan = choose_plan(M, N, K, order, device)
    assert plan.path == ("small" if M <= 8 else "medium")
    assert plan.grid % plan.cluster == 0
    assert 1 <= plan.grid // plan.cluster <= -(-N // 16)
    assert plan.cluster in ((1, 2, 4, 8) if device.has_cluster else (1,))
    assert plan.depth >= 1
    assert plan.shared_bytes <= device.shared_bytes_per_block
    assert plan.pdl == device.has_pdl
    if M > 8:
        groups = int(plan.kernel.split("_n")[1][0])
        assert groups * 8 >= M
        assert plan.x_depth >= 1


def test_two_ctas_fit_on_an_sm_where_the_rule_counts_on_it():
    for N, K in QWEN3:
        for M in (9, 16, 17, 32):
            assert 2 * (choose_plan(M, N, K, "bf16", H200).shared_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize("device", [H200, RTX_3090])
@pytest.mark.parametrize("M", [1, 8, 16, 64])
@pytest.mark.parametrize(("N", "K"), QWEN3)
def test_with_even_shared_memory_no_sm_holds_more_than_its_share(device, M, N, K):
    plan = choose_plan(M, N, K, "bf16", device)
    share = -(-plan.grid // device.sm_count)
    needed = even_shared_bytes(plan, device)
    cta = 1024 + -(-needed // 128) * 128  # 1,024 bytes of the system's; 128 at a time
    assert plan.shared_bytes <= needed <= device.shared_bytes_per_block
    assert (device.shared_bytes_per_block + 1024) // cta <= share
    if needed > plan.shared_bytes:  # nothing is lost
        assert (device.shared_bytes_per_block + 1024) // cta == share


@pytest.mark.parametrize("device", [H200, RTX_3090])
@pytest.mark.parametrize("M", [9, 16, 32, 64, 65, 192])
def test_linear_medium_never_prepares_x_itself(device, M):
    plan = choose_plan(M, 4096, 4096, "bf16", device)
    assert (plan.path, plan.apart) == ("medium", False)
    assert choose_plan(M, 4096, 4096, "bf16", device, True) == replace(plan, apart=True)


@pytest.mark.parametrize("bounds", TOKEN_RANGES)
def test_rows_get_the_same_plan_within_a_range_of_m(bounds):
    """So that the bits of a row do not depend on its neighbours (K7)."""
    first, last = bounds
    for N, K in QWEN3:
        plans = {
            (p.kernel, p.grid, p.cluster)
            for p in (choose_plan(M, N, K, "bf16", H200) for M in range(first, last + 1))
        }
        assert len(plans) == 1


@pytest.mark.parametrize(
    ("M", "passes", "part"), [(65, 2, 33), (128, 2, 64), (129, 3, 43), (192, 3, 64)]
)
def test_more_tokens_take_equal_passes(M, passes, part):
    plan = choose_plan(M, 4096, 4096, "bf16", H200)
    once = choose_plan(part, 4096, 4096, "bf16", H200)
    assert plan == replace(once, passes=passes, reason=f"{passes} passes; {once.reason}")


def test_passes_that_would_not_fit_are_unpacked():
    tight = DeviceFacts(82, 48 << 10, has_pdl=False, has_cluster=False)
    assert choose_plan(128, 4096, 4096, "bf16", tight).path == "unpack"


@pytest.mark.parametrize("M", [193, 4096])
def test_large_m_is_unpacked_and_says_why(M):
    plan = choose_plan(M, 4096, 4096, "bf16", H200)
    assert plan.path == "unpack"
    assert f"M = {M}" in plan.reason


@pytest.mark.parametrize("sizes", [(0, 8, 16), (1, 0, 16), (1, 8, 0), (1, 8, 24)])
def test_bad_sizes(sizes):
    with pytest.raises(ValueError, match="multiple of 16"):
        choose_plan(*sizes, "bf16", H200)
    with pytest.raises(ValueError, match="order is 'f32'"):
        choose_plan(1, 8, 16, "f32", H200)


@pytest.mark.parametrize(
    ("M", "split", "fault"),
    [
        (8, MediumSplit(1, 1, 8, 2, 2), "linear_medium takes 9 to 64 tokens"),
        (32, MediumSplit(2, 1, 8, 2, 2), r"built for \(1,\) row tiles a warp"),
        (16, MediumSplit(1, 3, 8, 2, 2), "3 CTAs cannot form a cluster"),
        (16, MediumSplit(1, 1, 17, 2, 2), "17 groups of CTAs cannot share 16 row tiles"),
        (16, MediumSplit(1, 1, 8, 0, 2), "a ring has at least one stage"),
        (16, MediumSplit(1, 1, 8, 2, 0), "a ring has at least one stage"),
        (64, MediumSplit(2, 1, 8, 6, 1), "bytes of shared memory, a CTA has 232448"),
    ],
)
def test_impossible_splits_are_refused(M, split, fault):
    with pytest.raises(ValueError, match=fault):
        plan_with(split, M, 256, 512, "bf16", H200, reason="")


def test_clusters_are_refused_where_there_are_none():
    with pytest.raises(ValueError, match="2 CTAs cannot form a cluster"):
        plan_with(MediumSplit(1, 2, 8, 1, 1), 16, 256, 512, "bf16", RTX_3090, reason="")


@pytest.mark.parametrize("M", [9, 24, 40, 64])
@pytest.mark.parametrize("device", [H200, RTX_3090])
def test_a_plan_comes_back_from_its_own_split(M, device):
    plan = choose_plan(M, 10240, 5120, "f16", device)
    again = plan_with(plan.split, M, 10240, 5120, "f16", device, reason=plan.reason)
    assert again == plan


def test_every_m_is_in_the_range_that_names_it():
    assert TOKEN_RANGES[0][0] == 1
    assert TOKEN_RANGES[-1][1] == MAX_MEDIUM_M
    for before, after in pairwise(TOKEN_RANGES):
        assert after[0] == before[1] + 1
    for first, last in TOKEN_RANGES:
        assert {token_range(M) for M in range(first, last + 1)} == {(first, last)}
