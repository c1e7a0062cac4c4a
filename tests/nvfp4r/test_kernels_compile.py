"""Every kernel compiles for every target, without spills and under a ceiling of registers."""

import pytest

from nvfp4r.jit import ENTRY, TARGETS, compile_cubin, kernel_sources, resources, target_named
from nvfp4r.plan import DeviceFacts, choose_plan

# How many CTAs of a kernel an SM must hold, as in nvfp4r.cu: plan.py counts on them. With the
# 65,536 registers of an SM that is a ceiling for each. By what comes before and after the dtype.
CTAS_PER_SM = {
    "small_w4": 6,
    "small_w8": 3,
    "small_w12": 2,
    "small_w4_q": 4,
    "small_w8_q": 2,
    "small_w12_q": 1,
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
REGISTERS_PER_SM = 65_536


def kind_of(name: str) -> str:
    return name.removeprefix("linear_").replace("_bf16", "").replace("_f16", "")


def threads_of(kind: str) -> int:
    if kind.startswith("small"):
        return 32 * (int(kind.split("_w")[1].removesuffix("_q")) + 1)
    return 320 if kind.startswith("medium") else 256


def allocated_registers(registers: int, threads: int) -> int:
    """Registers that a CTA takes: whole units of 256 for each warp."""
    return -(-registers * 32 // 256) * 256 * threads // 32


@pytest.fixture(scope="module", params=TARGETS)
def kernels(request):
    return resources(compile_cubin(target_named(request.param), kernel_sources(), ENTRY))


def test_d7_no_spill_and_few_registers(kernels):
    assert {kind_of(name) for name in kernels} == set(CTAS_PER_SM)
    assert len(kernels) == 2 * len(CTAS_PER_SM)
    for name, used in kernels.items():
        assert (used.spill_bytes, used.stack_bytes) == (0, 0), name
        kind = kind_of(name)
        taken = CTAS_PER_SM[kind] * allocated_registers(used.registers, threads_of(kind))
        assert taken <= REGISTERS_PER_SM, f"{name}: {used.registers} registers"


def test_every_plan_names_a_kernel_that_exists(kernels):
    for sms in (16, 82, 132, 148):
        for shared, has_cluster in ((101_376, False), (232_448, True)):
            device = DeviceFacts(sms, shared, has_pdl=False, has_cluster=has_cluster)
            for order in ("bf16", "f16"):
                for M in (1, 8, 9, 16, 17, 33, 64):
                    for N in (8, 4096, 5120, 7168, 10240, 51200):
                        for K in (16, 4096, 25600):
                            for quantised in (False, True):
                                plan = choose_plan(M, N, K, order, device, quantised)
                                assert plan.kernel in kernels
