"""The plan: legal on every shape, equal to the measured choice on the shapes it was measured on."""

import pytest

from nvfp4r.plan import DeviceFacts, choose_plan

H200 = DeviceFacts(sm_count=132, shared_bytes_per_block=232_448, has_pdl=True)
RTX_3090 = DeviceFacts(sm_count=82, shared_bytes_per_block=101_376, has_pdl=False)

MEASURED = [  # N, K, warps, CTAs: the table of plan.py
    (4096, 4096, 8, 256),
    (4096, 12288, 12, 256),
    (5120, 5120, 8, 320),
    (5120, 25600, 8, 320),
    (6144, 4096, 8, 384),
    (7168, 5120, 12, 264),
    (10240, 5120, 4, 640),
    (24576, 4096, 4, 792),
    (51200, 5120, 4, 792),
]


@pytest.mark.parametrize(("N", "K", "warps", "grid"), MEASURED)
@pytest.mark.parametrize("M", [1, 8])
def test_measured_shapes(M, N, K, warps, grid):
    plan = choose_plan(M, N, K, "bf16", H200)
    assert plan.kernel == f"linear_small_bf16_n1_w{warps}"
    assert (plan.grid, plan.threads, plan.pdl) == (grid, 32 * (warps + 1), True)


@pytest.mark.parametrize("device", [H200, RTX_3090])
@pytest.mark.parametrize("order", ["bf16", "f16"])
@pytest.mark.parametrize("M", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize("N", [1, 8, 24, 1000, 1024, 4096, 151_936])
@pytest.mark.parametrize("K", [16, 48, 64, 192, 448, 3696, 25_600])
def test_every_small_shape_has_a_legal_plan(device, order, M, N, K):
    plan = choose_plan(M, N, K, order, device)
    assert plan.path == "small"
    assert 1 <= plan.grid <= -(-N // 16)
    assert plan.shared_bytes <= device.shared_bytes_per_block
    warps = int(plan.kernel.rsplit("_w", 1)[1])
    assert plan.threads == 32 * (warps + 1) <= 1024
    assert f"_n{1 if M <= 8 else 2}_" in plan.kernel
    assert plan.pdl == device.has_pdl


def test_rows_get_the_same_plan_for_every_m_up_to_8():
    """So that the bits of a row do not depend on its neighbours (K7)."""
    for N, K, _, _ in MEASURED:
        plans = {
            (p.kernel, p.grid) for p in (choose_plan(M, N, K, "bf16", H200) for M in range(1, 9))
        }
        assert len(plans) == 1


@pytest.mark.parametrize("M", [17, 64, 4096])
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
