"""More tokens than a kernel takes: it runs several times, on equal parts of them."""

from __future__ import annotations

import pytest
import torch

from nvfp4r import launches, quantize
from nvfp4r.launches import Layer, plan_for, run_plan
from nvfp4r.ops import linear
from nvfp4r.packed import pack
from nvfp4r.plan import DeviceFacts, MediumSplit
from nvfp4r.tuned import Problem, Tuned

H200 = DeviceFacts(sm_count=132, shared_bytes_per_block=232_448, has_pdl=True, has_cluster=True)
N, K = 40, 144


@pytest.fixture
def tuned(monkeypatch):
    """Plans as if tuned on this machine."""
    plans = {}
    monkeypatch.setattr(launches, "tuned_plans", lambda index: plans)
    return plans


@pytest.mark.parametrize(
    ("M", "sizes"),
    [(64, [64]), (65, [33, 32]), (128, [64, 64]), (130, [44, 44, 42]), (192, [64, 64, 64])],
)
def test_every_row_is_computed_once_and_in_place(monkeypatch, tuned, M, sizes):
    weight = quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(0)))
    packed = pack(weight, "bf16")
    layer = Layer(packed.tiles, packed.alpha, None, None, N, K, "bf16")
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    seen = []

    def run_once(plan, part, layer, y, prologue):
        assert part.data_ptr() % 16 == 0
        seen.append(part.shape[0])
        y.copy_(linear(part, *layer))

    monkeypatch.setattr(launches, "_run_once", run_once)
    plan = plan_for(M, N, K, "bf16", H200, 0)
    out = torch.full((M, N), float("nan"), dtype=x.dtype)
    assert run_plan(plan, x, layer, out=out) is out
    assert seen == sizes
    assert torch.equal(out, linear(x, *layer))


def test_a_tuned_plan_serves_the_passes_too(tuned):
    split = MediumSplit(held=1, cluster=2, clusters=1, depth=2, x_depth=2)
    tuned[Problem((33, 48), N, K, "bf16", False)] = Tuned(split, 1.0, 2.0)
    plan = plan_for(90, N, K, "bf16", H200, 0)
    assert (plan.passes, plan.split) == (2, split)
    assert plan.reason.startswith("2 passes; tuned on this GPU")
