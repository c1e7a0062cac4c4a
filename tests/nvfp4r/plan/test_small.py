"""Plans for up to 8 tokens: legal on every GPU, one for a range of M, and who prepares x."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from nvfp4r.jit import ENTRY, kernel_sources
from nvfp4r.plan import TOKEN_RANGES, DeviceFacts, choose_plan, plan_with
from nvfp4r.plan.small import MAX_SMALL_M, SMALL_WARPS, SmallSplit, small_fault

H200 = DeviceFacts(132, 232_448, has_pdl=True, has_cluster=True, has_wgmma=True)
GPUS = {
    "H200": H200,
    "a slice of it": replace(H200, sm_count=16),
    "A100": DeviceFacts(108, 166_912, has_pdl=False, has_cluster=False),
    "RTX 3090": DeviceFacts(82, 101_376, has_pdl=False, has_cluster=False),
    "RTX 5090": DeviceFacts(170, 101_376, has_pdl=True, has_cluster=True),
}
SHAPES = [
    *((N, K) for N in (1, 24, 1000, 151_936) for K in (16, 48, 272, 3696)),
    *((4096, 4096), (4096, 12288), (6144, 4096), (24576, 4096)),
    *((5120, 5120), (5120, 8192), (5120, 17408), (5120, 25600)),
    *((7168, 5120), (10240, 5120), (34816, 5120), (51200, 5120)),
    *((4096, 5136), (4224, 16_384), (51200, 65_536), (64, 262_144)),
]
SMALL_RANGES = [bounds for bounds in TOKEN_RANGES if bounds[1] <= MAX_SMALL_M]

on_every_gpu = pytest.mark.parametrize("gpu", GPUS)
of_every_shape = pytest.mark.parametrize(("N", "K"), SHAPES)
prepared_or_not = pytest.mark.parametrize("quantised", [False, True])

# N, K, for 1 and 2 tokens, for 3 to 8: the tables of plan/small.py.
MEASURED = [
    (4096, 4096, SmallSplit(12, 132, 3, True), SmallSplit(8, 256)),
    (4096, 12288, SmallSplit(12, 256), SmallSplit(12, 256)),
    (5120, 5120, SmallSplit(8, 320), SmallSplit(8, 320)),
    (5120, 25600, SmallSplit(8, 320), SmallSplit(8, 320)),
    (6144, 4096, SmallSplit(12, 132, 3, True), SmallSplit(8, 384)),
    (7168, 5120, SmallSplit(12, 264, 2, True), SmallSplit(12, 264)),
    (10240, 5120, SmallSplit(12, 132, 3, True), SmallSplit(4, 640)),
    (24576, 4096, SmallSplit(4, 528, 3, True), SmallSplit(4, 792)),
    (34816, 5120, SmallSplit(12, 264, 3, True), SmallSplit(4, 792)),
    (51200, 5120, SmallSplit(12, 264, 3, True), SmallSplit(4, 792)),
]


def built_kernels() -> set[str]:
    """Those for bf16, from the list in the CUDA source."""
    listed = re.findall(r"^ +(SMALL|SHARED)\(NAME, MODE, (\d+), \d\)", kernel_source(ENTRY), re.M)
    suffix = {"SMALL": "", "SHARED": "_s"}
    return {f"linear_small_bf16_w{warps}{suffix[macro]}" for macro, warps in listed}


def kernel_source(name: str) -> str:
    return kernel_sources()[name]


@pytest.mark.parametrize(("N", "K", "two", "eight"), MEASURED)
def test_measured_shapes(N, K, two, eight):
    for M, split in ((1, two), (2, two), (3, eight), (8, eight)):
        plan = choose_plan(M, N, K, "bf16", H200)
        assert (plan.path, plan.split, plan.pdl, plan.apart) == ("small", split, True, False)
        assert plan.kernel == f"linear_small_bf16_w{split.warps}{'_s' * split.shared_x}"
        assert (plan.grid, plan.depth) == (split.grid, split.depth)
        assert ("x in shared memory" in plan.reason) == split.shared_x


@pytest.mark.parametrize(
    ("tiles", "split"),  # where the rule for 1 and 2 tokens changes
    [
        (1, SmallSplit(12, 1, 3, True)),
        (131, SmallSplit(12, 131, 3, True)),
        (264, SmallSplit(12, 132, 3, True)),
        (265, SmallSplit(8, 265)),
        (330, SmallSplit(8, 330)),
        (331, SmallSplit(12, 132, 3, True)),
        (396, SmallSplit(12, 132, 3, True)),
        (397, SmallSplit(12, 264, 2, True)),
        (528, SmallSplit(12, 264, 2, True)),
        (529, SmallSplit(12, 132, 3, True)),
        (1056, SmallSplit(12, 132, 3, True)),
        (1057, SmallSplit(4, 528, 3, True)),
        (1584, SmallSplit(4, 528, 3, True)),
        (1585, SmallSplit(12, 264, 3, True)),
    ],
)
def test_borders_between_the_measured_shapes(tiles, split):
    assert choose_plan(2, 16 * tiles, 5120, "f16", H200).split == split
    assert not choose_plan(2, 16 * tiles, 5136, "f16", H200).split.shared_x


@on_every_gpu
@of_every_shape
@prepared_or_not
def test_every_shape_has_a_legal_plan(gpu, N, K, quantised):
    facts, tiles, built = GPUS[gpu], -(-N // 16), built_kernels()
    for M in range(1, MAX_SMALL_M + 1):
        plan = choose_plan(M, N, K, "bf16", facts, quantised)
        split = plan.split
        assert (plan.path, plan.passes, plan.cluster, plan.x_depth) == ("small", 1, 1, 0)
        assert plan.kernel in built
        assert small_fault(split, M, tiles) is None
        assert 1 <= plan.grid == split.grid <= tiles
        assert plan.depth == split.depth >= 2
        assert plan.threads == split.threads <= 1024
        assert plan.shared_bytes == split.shared_bytes(M, K) <= facts.shared_bytes_per_block
        assert plan.pdl == facts.has_pdl


@on_every_gpu
@of_every_shape
def test_x_that_has_to_be_prepared_goes_where_that_happens(gpu, N, K):
    """The same work otherwise, so that rounded before or by the kernel is the same to the bit."""
    for M in range(1, MAX_SMALL_M + 1):
        plain = choose_plan(M, N, K, "bf16", GPUS[gpu])
        assert not plain.apart
        apart = not plain.kernel.endswith("_w12_s")  # linear_small cannot; 4 warps take longer
        assert choose_plan(M, N, K, "bf16", GPUS[gpu], True) == replace(plain, apart=apart)


@on_every_gpu
@of_every_shape
@prepared_or_not
@pytest.mark.parametrize("bounds", SMALL_RANGES)
def test_rows_get_the_same_plan_within_a_range_of_m(gpu, N, K, quantised, bounds):
    """So that the bits of a row do not depend on its neighbours (K7)."""
    plans = {
        replace(choose_plan(M, N, K, "bf16", GPUS[gpu], quantised), shared_bytes=0)
        for M in range(bounds[0], bounds[1] + 1)
    }
    assert len(plans) == 1


@on_every_gpu
@of_every_shape
def test_an_sm_holds_all_ctas_that_the_rule_gives_it(gpu, N, K):
    """With x in shared memory; each CTA costs 1024 bytes more than it asks for."""
    facts = GPUS[gpu]
    plan = choose_plan(2, N, K, "bf16", facts)
    if plan.split.shared_x:
        per_sm = -(-plan.grid // facts.sm_count)
        assert per_sm * (plan.shared_bytes + 1024) <= facts.shared_bytes_per_block + 1024


def test_where_x_does_not_fit_linear_small_serves_one_token_too():
    """Where two CTAs of 12 warps do not fit on an SM."""
    for facts in (GPUS["RTX 3090"], GPUS["RTX 5090"]):
        assert choose_plan(1, 151_936, 3696, "bf16", facts).split == SmallSplit(
            4, 6 * facts.sm_count
        )


# ---- what the kernels need ----------------------------------------------------------------------


def test_the_warps_are_those_that_are_built():
    assert built_kernels() == {
        f"linear_small_bf16_w{warps}{'_s' * shared_x}"
        for shared_x, built in SMALL_WARPS.items()
        for warps in built
    }


@pytest.mark.parametrize(("shared_x", "macro"), [(False, "SMALL"), (True, "SHARED")])
def test_threads_are_those_that_the_kernels_are_built_for(shared_x, macro):
    found = re.search(
        rf"#define {macro}\(.*\n.*__launch_bounds__\(32 \* \(W \+ (\d)\), HELD\)",
        kernel_source(ENTRY),
    )
    for warps in SMALL_WARPS[shared_x]:
        assert SmallSplit(warps, 1, 2, shared_x).threads == 32 * (warps + int(found[1]))


def shared_constants() -> tuple[int, int]:
    """Buffers of sums, and bytes of a token's 256 columns, as linear_shared.cuh has them."""
    text = kernel_source("linear_shared.cuh")
    buffers = re.search(r"kSumBuffers = (\d+);", text)
    token = re.search(r"kSharedTokenBytes = (\d+) \* (\d+) \+ (\d+);", text)
    a, b, c = map(int, token.groups())
    return int(buffers[1]), a * b + c


@pytest.mark.parametrize("warps", SMALL_WARPS[True])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("M", [1, 2, 3, 8])
@pytest.mark.parametrize("K", [16, 144, 256, 272, 3072, 3088, 4096, 5120, 12288])
def test_shared_memory_holds_what_linear_shared_puts_there(warps, depth, M, K):
    """Addresses as kernels/linear_shared.cuh works them out."""
    buffers, token_bytes = shared_constants()
    assert (buffers, token_bytes) == (4, 528)
    kblocks = -(-K // 128)
    chunks = (kblocks + 2 * warps - 1) // (2 * warps)
    unit_bytes = M * token_bytes
    base = chunks * warps * unit_bytes
    full = base + depth * warps * 2304
    sums_full = full + 16 * depth
    sums = sums_full + 16 * buffers
    end = sums + buffers * warps * 16 * M * 4
    assert SmallSplit(warps, 1, depth, True).shared_bytes(M, K) == end
    assert (base % 16, full % 8, sums % 4) == (0, 0, 0)  # bulk copies, barriers, floats
    # x ends before the ring: the last block of 16 columns, and the last that a warp reads.
    last = 8 * kblocks - 1
    stored = ((last >> 4) * M + M - 1) * token_bytes + (last & 15) * 32 + 32
    assert stored <= base
    read = ((kblocks - 1) // 2 * M + M - 1) * token_bytes + (kblocks - 1) % 2 * 256 + 256
    assert read <= stored


@pytest.mark.parametrize("warps", SMALL_WARPS[False])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("M", [1, 8])
def test_shared_memory_holds_what_linear_small_puts_there(warps, depth, M):
    """Ring and barriers, then two buffers of sums; x is not there, so that K does not matter."""
    sums = depth * (warps * 2304 + 16)
    for K in (16, 4096, 25_600):
        split = SmallSplit(warps, 1, depth)
        assert split.shared_bytes(M, K) == sums + 2 * warps * 16 * M * 4


# ---- other splits -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("M", "split", "fault"),
    [
        (9, SmallSplit(4, 8), "linear_small takes up to 8 tokens"),
        (9, SmallSplit(4, 8, 2, True), "linear_small takes up to 8 tokens"),
        (1, SmallSplit(6, 8), r"linear_small is built for \(4, 8, 12\) warps"),
        (1, SmallSplit(8, 8, 2, True), r"linear_shared is built for \(4, 12\) warps"),
        (1, SmallSplit(4, 8, 0), "a ring has at least one stage"),
        (1, SmallSplit(12, 8, 0, True), "a ring has at least one stage"),
        (1, SmallSplit(4, 0), "0 groups of CTAs cannot share 16 row tiles"),
        (1, SmallSplit(4, 17), "17 groups of CTAs cannot share 16 row tiles"),
        (1, SmallSplit(12, 17, 2, True), "17 groups of CTAs cannot share 16 row tiles"),
        (1, SmallSplit(12, 8, 9), "250512 bytes of shared memory, a CTA has 232448"),
        (8, SmallSplit(12, 8, 4, True), "bytes of shared memory, a CTA has 232448"),
    ],
)
def test_impossible_splits_are_refused(M, split, fault):
    with pytest.raises(ValueError, match=fault):
        plan_with(split, M, 256, 8192, "bf16", H200, reason="")


def test_what_fits_depends_on_k_where_x_is_in_shared_memory():
    split = SmallSplit(4, 8, 2, True)
    assert plan_with(split, 8, 256, 4096, "bf16", GPUS["RTX 5090"], reason="").split == split
    with pytest.raises(ValueError, match="bytes of shared memory, a CTA has 101376"):
        plan_with(split, 8, 256, 4112, "bf16", GPUS["RTX 5090"], reason="")


@prepared_or_not
@pytest.mark.parametrize(
    ("split", "by_the_kernel"),
    [
        *((SmallSplit(warps, 8), False) for warps in SMALL_WARPS[False]),
        (SmallSplit(4, 8, 2, True), False),
        (SmallSplit(12, 8, 2, True), True),
    ],
)
def test_a_split_that_was_not_chosen_by_the_rule_says_who_prepares_x(
    quantised, split, by_the_kernel
):
    plan = plan_with(split, 3, 256, 512, "bf16", H200, quantised, reason="")
    assert plan.apart == (quantised and not by_the_kernel)


@on_every_gpu
@prepared_or_not
@pytest.mark.parametrize("M", [1, 2, 3, 8])
@pytest.mark.parametrize(("N", "K"), [(10240, 5120), (5120, 25600)])
def test_a_plan_comes_back_from_its_own_split(gpu, quantised, M, N, K):
    plan = choose_plan(M, N, K, "f16", GPUS[gpu], quantised)
    again = plan_with(plan.split, M, N, K, "f16", GPUS[gpu], quantised, reason=plan.reason)
    assert again == plan
