"""Every kernel compiles for every target, without spills and under a ceiling of registers."""

import pytest

from nvfp4r.jit import ENTRY, TARGETS, compile_cubin, kernel_sources, resources, target_named
from nvfp4r.plan import DeviceFacts, choose_plan

REGISTER_CEILING = 128


@pytest.fixture(scope="module", params=TARGETS)
def kernels(request):
    return resources(compile_cubin(target_named(request.param), kernel_sources(), ENTRY))


def test_d7_no_spill_and_few_registers(kernels):
    assert len(kernels) >= 12
    for name, used in kernels.items():
        assert (used.spill_bytes, used.stack_bytes) == (0, 0), name
        assert used.registers <= REGISTER_CEILING, name


def test_every_plan_names_a_kernel_that_exists(kernels):
    for sms in (16, 82, 132, 148):
        device = DeviceFacts(sms, 101_376, has_pdl=False)
        for order in ("bf16", "f16"):
            for M in (1, 8, 9, 16):
                for N in (8, 4096, 5120, 7168, 10240, 51200):
                    for K in (16, 4096, 25600):
                        assert choose_plan(M, N, K, order, device).kernel in kernels
