"""Plans to be tried: every one legal for the whole range, of a kernel that is built, none twice."""

import re

import pytest

from nvfp4r.candidates import candidate_plans
from nvfp4r.jit import ENTRY, kernel_sources
from nvfp4r.plan import (
    MEDIUM_HELD,
    SMALL_WARPS,
    TOKEN_RANGES,
    DeviceFacts,
    MediumSplit,
    choose_plan,
    plan_with,
)

GPUS = {
    "H200": DeviceFacts(132, 232_448, has_pdl=True, has_cluster=True),
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
    """Names of the product kernels, without the dtype, from the list in the CUDA source."""
    text = kernel_sources()[ENTRY]
    small = re.findall(r"^ +SMALL\(NAME, MODE, (\d+), (_q)?, (?:true|false), \d\)", text, re.M)
    medium = re.findall(r"^ +MEDIUM\(NAME, MODE, (\d+), (\d+), \w+\(\d+\)\)", text, re.M)
    assert small
    assert medium
    return {f"small_w{W}{q}" for W, q in small} | {f"medium_n{n}_r{r}" for n, r in medium}


def test_the_sizes_that_plans_count_on_are_those_that_are_built():
    small = {f"small_w{W}{q}" for W in SMALL_WARPS for q in ("", "_q")}
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
            assert plan.kernel.endswith("_q") == (quantised and M <= 8)
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
    ("N", "warps", "per_sm"),  # 4096: no more tiles than two CTAs an SM; 24576: more than six
    [(4096, 3, set()), (6144, 3, {2}), (24576, 3, {2, 3, 4, 5, 6})],
)
def test_what_is_tried_for_few_tokens(N, warps, per_sm):
    plans = candidate_plans(1, N, 4096, "bf16", GPUS["H200"])
    assert {plan.split.warps for plan in plans} == set(SMALL_WARPS)
    assert {plan.grid for plan in plans} == {N // 16, *(132 * count for count in per_sm)}
    assert len(plans) == warps * (1 + len(per_sm))


@pytest.mark.parametrize(("N", "K"), [(4096, 4096), (5120, 25600), (24576, 4096)])
@pytest.mark.parametrize("M", [16, 48, 64])
def test_what_is_tried_for_more_tokens(M, N, K):
    splits = [plan.split for plan in candidate_plans(M, N, K, "bf16", GPUS["H200"])]
    assert {split.held for split in splits} == {1, 2}
    assert {split.cluster for split in splits} == {1, 2, 4, 8}
    assert len({split.depth for split in splits}) > 1
    # Where the rule's own ring fits the whole range, its way is among them.
    rule = choose_plan(M, N, K, "bf16", GPUS["H200"]).split
    assert (rule.held, rule.cluster) in {(split.held, split.cluster) for split in splits}


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
