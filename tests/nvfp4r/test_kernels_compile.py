"""Every kernel compiles for every target, without spills and under a ceiling of registers."""

import pytest

from nvfp4r.jit import ENTRY, TARGETS, compile_cubin, kernel_sources, resources, target_named
from nvfp4r.plan import DeviceFacts, choose_plan

# How many CTAs of a kernel an SM must hold, the third column of nvfp4r.cu: plan.py counts on them.
# With the 65,536 registers of an SM this is a ceiling of 64, 72 and 72 registers for up to 8
# tokens, and of 136, 224 and 152 for up to 16.
CTAS_PER_SM = {"n1_w4": 6, "n1_w8": 3, "n1_w12": 2, "n2_w4": 3, "n2_w8": 1, "n2_w12": 1}
REGISTERS_PER_SM = 65_536


def allocated_registers(registers: int, threads: int) -> int:
    """Registers that a CTA takes: whole units of 256 for each warp."""
    return -(-registers * 32 // 256) * 256 * threads // 32


@pytest.fixture(scope="module", params=TARGETS)
def kernels(request):
    return resources(compile_cubin(target_named(request.param), kernel_sources(), ENTRY))


def test_d7_no_spill_and_few_registers(kernels):
    assert len(kernels) >= 12
    for name, used in kernels.items():
        assert (used.spill_bytes, used.stack_bytes) == (0, 0), name
        kind = name.removeprefix("linear_small_").partition("_")[2]
        threads = 32 * (int(kind.rpartition("w")[2]) + 1)
        taken = CTAS_PER_SM[kind] * allocated_registers(used.registers, threads)
        assert taken <= REGISTERS_PER_SM, f"{name}: {used.registers} registers"


def test_every_plan_names_a_kernel_that_exists(kernels):
    for sms in (16, 82, 132, 148):
        device = DeviceFacts(sms, 101_376, has_pdl=False)
        for order in ("bf16", "f16"):
            for M in (1, 8, 9, 16):
                for N in (8, 4096, 5120, 7168, 10240, 51200):
                    for K in (16, 4096, 25600):
                        assert choose_plan(M, N, K, order, device).kernel in kernels
