"""Plans to be tried: every one legal for the whole range, of a kernel that is built, none twice."""

import re
from dataclasses import replace
from itertools import product

import pytest

from nvfp4r.jit import ENTRY, kernel_sources
from nvfp4r.plan import (
    TOKEN_RANGES,
    DeviceFacts,
    choose_plan,
    plan_with,
)
from nvfp4r.plan.large import LargeSplit
from nvfp4r.plan.medium import MEDIUM_HELD, MediumSplit
from nvfp4r.plan.small import SMALL_WARPS
from nvfp4r.tuning.candidates import candidate_plans

GPUS = {
    "H200": DeviceFacts(132, 232_448, has_pdl=True, has_cluster=True, has_wgmma=True),
    "B200": DeviceFacts(148, 232_448, has_pdl=True, has_cluster=True),
    "100 KB, clusters": DeviceFacts(170, 101_376, has_pdl=True, has_cluster=True),
    "100 KB": DeviceFacts(82, 101_376, has_pdl=False, has_cluster=False),
}
SHAPES = [
    (1, 16),
    (40, 48),
    (1000, 448),
    (4096, 4096),
    (4096, 12288),
    (24576, 4096),
    (51200, 5120),
    (151_936, 5120),
]

on_every_gpu = pytest.mark.parametrize("gpu", GPUS)
of_every_shape = pytest.mark.parametrize(("N", "K"), SHAPES)
in_every_range = pytest.mark.parametrize("bounds", TOKEN_RANGES)


def built_kernels() -> set[str]:
    """Names of what candidates may be, without the dtype, from the list in the CUDA source."""
    text = kernel_sources()[ENTRY]
    small = re.findall(r"^ +SMALL\(NAME, MODE, (\d+), \d\)", text, re.M)
    shared = re.findall(r"^ +SHARED\(NAME, MODE, (\d+), \d\)", text, re.M)
    medium = re.findall(r"^ +MEDIUM\(NAME, MODE, (\d+), (\d+), \w+\(\d+\)\)", text, re.M)
    assert small
    assert shared
    assert medium
    few = {f"small_w{W}" for W in small} | {f"small_w{W}_s" for W in shared}
    return few | {f"medium_n{n}_r{r}" for n, r in medium}


def test_the_sizes_that_plans_count_on_are_those_that_are_built():
    small = {f"small_w{W}{'_s' * x}" for x, all_W in SMALL_WARPS.items() for W in all_W}
    medium = {f"medium_n{n}_r{held}" for n, all_held in MEDIUM_HELD.items() for held in all_held}
    assert small | medium == built_kernels()


@on_every_gpu
@of_every_shape
@in_every_range
@pytest.mark.parametrize("quantised", [False, True])
def test_every_candidate_is_legal(gpu, N, K, bounds, quantised):
    facts, tiles, built = GPUS[gpu], -(-N // 16), built_kernels()
    for M in bounds:
        plans = candidate_plans(M, N, K, "bf16", facts, quantised)
        assert len({plan.split for plan in plans}) == len(plans) > 0
        for plan in plans:
            assert plan.kernel.removeprefix("linear_").replace("_bf16", "") in built
            assert plan.path == ("small" if M <= 8 else "medium")
            assert plan.apart == (quantised and not plan.kernel.endswith("_w12_s"))
            assert plan.shared_bytes <= facts.shared_bytes_per_block
            assert plan.pdl == facts.has_pdl
            assert plan.depth >= 1
            assert plan.cluster in ((1, 2, 4, 8) if facts.has_cluster else (1,))
            assert plan.grid % plan.cluster == 0
            assert 1 <= plan.grid // plan.cluster <= tiles
            if M > 8:
                assert plan.x_depth >= 1
                assert plan.grid <= 2 * facts.sm_count  # so that the GPU holds all at once
                assert int(plan.kernel.split("_n")[1][0]) * 8 >= M


@on_every_gpu
@of_every_shape
@in_every_range
def test_k7_one_list_of_splits_serves_a_whole_range(gpu, N, K, bounds):
    lists = [
        [plan.split for plan in candidate_plans(M, N, K, "f16", GPUS[gpu])]
        for M in range(bounds[0], bounds[1] + 1, 3)
    ]
    assert all(splits == lists[0] for splits in lists)


@pytest.mark.parametrize(
    ("N", "per_sm", "shared_per_sm"),  # 4096: no more tiles than two CTAs an SM; 24576: than 12
    [(4096, set(), {1}), (6144, {2}, {1, 2}), (24576, {2, 3, 4, 5, 6}, {1, 2, 3, 4})],
)
@pytest.mark.parametrize("quantised", [False, True])
def test_what_is_tried_for_few_tokens(N, per_sm, shared_per_sm, quantised):
    plans = candidate_plans(1, N, 4096, "bf16", GPUS["H200"], quantised)
    for shared_x, counts, depths in ((False, per_sm, {2}), (True, shared_per_sm, {2, 3})):
        splits = [plan.split for plan in plans if plan.split.shared_x == shared_x]
        grids = {N // 16, *(132 * count for count in counts)}
        assert {(split.warps, split.grid, split.depth) for split in splits} == set(
            product(SMALL_WARPS[shared_x], grids, depths)
        )


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("M", [2, 8])
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_the_rule_for_few_tokens_is_among_what_is_tried(N, K, M, quantised):
    for facts in GPUS.values():
        rule = choose_plan(M, N, K, "bf16", facts, quantised)
        plans = candidate_plans(M, N, K, "bf16", facts, quantised)
        assert rule in {replace(plan, reason=rule.reason) for plan in plans}


@pytest.mark.parametrize(
    ("M", "K", "tried"),  # warps and depth: what 2 tokens, or 8, leave room for
    [
        *((M, 8192, {(4, 2), (4, 3), (12, 2), (12, 3)}) for M in (1, 2)),
        *((M, 8192, {(4, 2), (4, 3), (12, 2)}) for M in (3, 8)),
        *((M, 16_384, set()) for M in (3, 8)),
    ],
)
def test_x_in_shared_memory_is_tried_where_the_last_m_of_the_range_fits(M, K, tried):
    splits = [plan.split for plan in candidate_plans(M, 4096, K, "bf16", GPUS["H200"])]
    assert {(split.warps, split.depth) for split in splits if split.shared_x} == tried


@pytest.mark.parametrize(("N", "count"), [(4096, 11), (24576, 38)])
def test_the_lists_are_as_long_as_the_docstring_says(N, count):
    assert len(candidate_plans(8, N, 4096, "bf16", GPUS["H200"])) == count


@pytest.mark.parametrize(("N", "K"), [(4096, 4096), (5120, 25600), (24576, 4096)])
@pytest.mark.parametrize("M", [16, 48, 64])
def test_what_is_tried_for_more_tokens(M, N, K):
    splits = [plan.split for plan in candidate_plans(M, N, K, "bf16", GPUS["H200"])]
    assert {split.held for split in splits} == {1, 2}
    assert {split.cluster for split in splits} == {1, 2, 4, 8}
    assert len({split.depth for split in splits}) > 1
    # Where the rule's own ring fits the whole range, its way is among them.
    rule = choose_plan(M, N, K, "bf16", replace(GPUS["H200"], has_wgmma=False)).split
    assert (rule.held, rule.cluster) in {(split.held, split.cluster) for split in splits}


@pytest.mark.parametrize("M", [33, 48, 64])
def test_linear_medium_alone_is_tried_beside_a_rule_of_linear_large(M):
    assert isinstance(choose_plan(M, 6144, 4096, "bf16", GPUS["H200"]).split, LargeSplit)
    plans = candidate_plans(M, 6144, 4096, "bf16", GPUS["H200"])
    assert {type(plan.split) for plan in plans} == {MediumSplit}
    assert {plan.path for plan in plans} == {"medium"}


@pytest.mark.parametrize("M", [0, 65])
def test_other_numbers_of_tokens_have_no_plans_to_try(M):
    with pytest.raises(ValueError, match=f"M is {M}; the kernels take 1 .. 64"):
        candidate_plans(M, 4096, 4096, "bf16", GPUS["H200"])


def test_a_ring_that_does_not_fit_is_refused_by_the_arithmetic_of_the_rule():
    """A ring that the H200 has room for is too large for 100 KB."""
    split = MediumSplit(2, 1, 8, 2, 2)
    plan_with(split, 48, 4096, 4096, "bf16", GPUS["H200"], reason="")
    with pytest.raises(ValueError, match=r"bytes of shared memory, a CTA has 101376"):
        plan_with(split, 48, 4096, 4096, "bf16", GPUS["100 KB"], reason="")
