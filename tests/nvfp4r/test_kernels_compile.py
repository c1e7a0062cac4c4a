"""Every kernel compiles for every target, without spills and under a ceiling of registers."""

import os
import re

import pytest

from nvfp4r.jit import (
    ENTRY,
    FURTHER_TARGETS,
    TARGETS,
    compile_cubin,
    kernel_sources,
    resources,
    target_named,
)
from nvfp4r.jit.module import LATE_TRIGGER
from nvfp4r.plan import DeviceFacts, choose_plan
from nvfp4r.plan.large import LARGE_HELD, LARGE_WARPS, LargeSplit

# How many CTAs of a kernel an SM must hold, as in nvfp4r.cu: plan/ counts on them. With the
# 65,536 registers of an SM that is a ceiling for each. By what comes before and after the dtype.
CTAS_PER_SM = {
    "small_w4": 6,
    "small_w8": 3,
    "small_w12": 2,
    "small_w4_s": 4,
    "small_w12_s": 2,
    "medium_n2_r1": 2,
    "medium_n2_r2": 2,
    "medium_n4_r1": 2,
    "medium_n6_r1": 1,
    "medium_n6_r2": 1,
    "medium_n8_r1": 1,
    "medium_n8_r2": 1,
    "quantize": 4,
    "unpack": 4,
}
LARGE = {
    f"large_n{groups}_r{held}": (groups, held)
    for groups, helds in LARGE_HELD.items()
    for held in helds
}
WITH_WGMMA = {"arrange": 4} | dict.fromkeys(LARGE, 1)
REGISTERS_PER_SM = 65_536


def kind_of(name: str) -> str:
    return name.removeprefix("linear_").replace("_bf16", "").replace("_f16", "")


def threads_of(kind: str) -> int:
    if kind.startswith("small"):
        warps, shared_x = re.fullmatch(r"small_w(\d+)(_s)?", kind).groups()
        return 32 * (int(warps) + (2 if shared_x else 1))
    if kind.startswith("large"):
        return LargeSplit(*LARGE[kind], 1, 1, 1, 1, 2).threads
    return 320 if kind.startswith("medium") else 256


def allocated_registers(registers: int, threads: int) -> int:
    """Registers that a CTA takes: whole units of 256 for each warp."""
    return -(-registers * 32 // 256) * 256 * threads // 32


@pytest.fixture(scope="module", params=TARGETS)
def target(request):
    return target_named(request.param)


def compiled(target, sources, entry, told, options=()):
    """A cubin; what ptxas says of wgmma and setmaxnreg goes to stderr, not to the log: `told`."""
    stderr = os.dup(2)
    with told.open("wb") as file:
        os.dup2(file.fileno(), 2)
        try:
            cubin = compile_cubin(target, sources, entry, options)
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
    return cubin, told.read_text()


@pytest.fixture(scope="module")
def build(target, tmp_path_factory):
    told = tmp_path_factory.mktemp("ptxas") / "stderr"
    return compiled(target, kernel_sources(), ENTRY, told)


@pytest.fixture(scope="module")
def kernels(build):
    return resources(build[0])


def test_d7_no_spill_and_few_registers(target, kernels):
    ctas = CTAS_PER_SM | (WITH_WGMMA if target.has_wgmma else {})
    assert {kind_of(name) for name in kernels} == set(ctas)
    assert len(kernels) == 2 * len(ctas)
    for name, used in kernels.items():
        assert (used.spill_bytes, used.stack_bytes) == (0, 0), name
        kind = kind_of(name)
        taken = ctas[kind] * allocated_registers(used.registers, threads_of(kind))
        assert taken <= REGISTERS_PER_SM, f"{name}: {used.registers} registers"


def test_wgmma_runs_as_it_is_written(build):
    """ptxas tells where it lets a wgmma wait for the one before, or drops a setmaxnreg."""
    assert build[1] == ""


def test_a_late_trigger_costs_no_registers(tmp_path):
    """The build for GPUs on which torch.compile's kernels start early."""
    target = target_named("90a")
    cubin, told = compiled(target, kernel_sources(), ENTRY, tmp_path / "stderr", (LATE_TRIGGER,))
    assert told == ""
    ctas = CTAS_PER_SM | WITH_WGMMA
    for name, used in resources(cubin).items():
        assert (used.spill_bytes, used.stack_bytes) == (0, 0), name
        kind = kind_of(name)
        taken = ctas[kind] * allocated_registers(used.registers, threads_of(kind))
        assert taken <= REGISTERS_PER_SM, f"{name}: {used.registers} registers"


DROPPED = (
    """extern "C" __global__ void k() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }"""
)
WAITING = """extern "C" __global__ void k(float* f, const unsigned* a, unsigned long long b) {
    float d[4] = {};
    for (int i = 0; i < 2; i++) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, "
                     "{%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[i]), "r"(a[i + 1]), "r"(a[i + 2]), "r"(a[i + 3]), "l"(b));
        f[i] = d[0];
    }
}"""


@pytest.mark.parametrize(("source", "message"), [(DROPPED, "setmaxnreg"), (WAITING, "GMMA")])
def test_what_ptxas_tells_is_found(tmp_path, source, message):
    _, told = compiled(target_named("90a"), {"k.cu": source}, "k.cu", tmp_path / "stderr")
    assert message in told


def constant(source: str, pattern: str) -> tuple[int, ...]:
    """The numbers of the one place in a source that matches."""
    (found,) = re.findall(pattern, kernel_sources()[source])
    return tuple(map(int, (found,) if isinstance(found, str) else found))


def moves_registers(kind: str) -> bool:
    pattern = r"bool moves_registers\(int NT, int RT\) \{ return NT \* RT > (\d+); \}"
    (limit,) = constant("large_work.cuh", pattern)
    groups, held = LARGE[kind]
    return groups * held > limit


def test_registers_that_move_between_warpgroups_are_those_of_the_launch(target, kernels):
    """What setmaxnreg leaves to all warpgroups together must fit what the CTA was given, or the
    second one waits for ever."""
    (few,) = constant("linear_large.cuh", r"setmaxnreg\.dec\.sync\.aligned\.u32 (\d+);")
    (many,) = constant("linear_large.cuh", r"setmaxnreg\.inc\.sync\.aligned\.u32 (\d+);")
    assert few % 8 == many % 8 == 0  # as the instruction takes them
    multiplying, others = 32 * LARGE_WARPS, 128
    moving = [n for n in kernels if kind_of(n) in LARGE and moves_registers(kind_of(n))]
    assert bool(moving) is target.has_wgmma
    for name in moving:
        assert threads_of(kind_of(name)) == multiplying + others  # whole warpgroups
        given = allocated_registers(kernels[name].registers, multiplying + others)
        assert few * others + many * multiplying <= given <= REGISTERS_PER_SM, name
        assert few < kernels[name].registers < many


def test_threads_of_a_plan_are_those_of_the_source():
    """plan/large.py and large_work.cuh say both how many warps there are beside those that
    multiply: one, or a warpgroup that gives registers away."""
    assert constant("large_work.cuh", r"int kLargeWarps = (\d+);") == (LARGE_WARPS,)
    whole, one = constant("large_work.cuh", r"\(moves_registers\(NT, RT\) \? (\d+) : (\d+)\)")
    assert (whole, one) == (128, 32)
    for kind in LARGE:
        more = whole if moves_registers(kind) else one
        assert threads_of(kind) == 32 * LARGE_WARPS + more


@pytest.mark.parametrize("name", [*TARGETS, *FURTHER_TARGETS])
def test_targets_with_wgmma_have_what_its_kernel_takes_for_granted(name):
    """linear_large copies in bulk, shares K in clusters, and plan/large.py counts on them."""
    target = target_named(name)
    assert not target.has_wgmma or (target.has_bulk_copy and target.has_cluster)


def test_every_plan_names_a_kernel_that_exists(target, kernels):
    devices = [
        DeviceFacts(sms, shared, has_pdl=False, has_cluster=has_cluster, has_wgmma=has_wgmma)
        for sms in (16, 82, 132, 148)
        for shared, has_cluster in ((101_376, False), (232_448, True))
        for has_wgmma in {False, has_cluster and target.has_wgmma}
    ]
    for device in devices:
        tokens = (1, 8, 9, 16, 17, 33, 64)
        if device.has_wgmma:
            tokens += (65, 128, 129, 257, 1024, 8192, 8193)
        for order in ("bf16", "f16"):
            for M in tokens:
                for N in (8, 4096, 5120, 7168, 10240, 51200):
                    for K in (16, 4096, 25600):
                        for quantised in (False, True):
                            plan = choose_plan(M, N, K, order, device, quantised)
                            assert plan.kernel in kernels
