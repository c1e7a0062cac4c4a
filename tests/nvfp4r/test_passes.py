"""What `run_plan` launches: a kernel several times for many tokens, one that prepares x before."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nvfp4r import launches, quantize
from nvfp4r.launches import Layer, plan_for, run_plan
from nvfp4r.ops import linear
from nvfp4r.packed import pack
from nvfp4r.plan import DeviceFacts, plan_with
from nvfp4r.plan.large import LargeSplit
from nvfp4r.plan.medium import MediumSplit
from nvfp4r.plan.small import SmallSplit
from nvfp4r.plan.tuned import Problem, Tuned
from tests.nvfp4r.fake_gpu import forgotten_launches

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


# ---- who prepares x -----------------------------------------------------------------------------

RAW, PREPARED = 1.0, 2.0
SPLITS = {"apart": SmallSplit(12, 3), "on its way": SmallSplit(12, 3, 2, shared_x=True)}


@pytest.fixture
def launched(monkeypatch):
    """What is launched, and with what: x as it came or prepared, and what is left to do to it."""
    seen = []

    def run_prologue(x, input_scale, facts, *, rotation):
        seen.append(("quantize", float(x[0, 0]), input_scale, rotation))
        return torch.full_like(x, PREPARED)

    def run_once(plan, x, layer, y, prologue):
        seen.append((plan.kernel, float(x[0, 0]), prologue))

    monkeypatch.setattr(launches, "run_prologue", run_prologue)
    monkeypatch.setattr(launches, "_run_once", run_once)
    monkeypatch.setattr(launches, "required_facts", lambda index: H200)
    return seen


def layer_that(rotates: bool, rounds: bool) -> Layer:
    empty = torch.empty(3, 2, 1152, dtype=torch.uint8)
    scale = torch.tensor(0.01) if rounds else None
    return Layer(empty, torch.ones(N), None, scale, N, K, "bf16", "hadamard16" * rotates or None)


@pytest.mark.parametrize(("rotates", "rounds", "bits"), [(1, 0, 1), (0, 1, 2), (1, 1, 3)])
def test_x_is_prepared_once_before_or_by_the_kernel(launched, rotates, rounds, bits):
    """By all that the layer asks for; then nothing is left to do."""
    layer = layer_that(rotates, rounds)
    x = torch.full((2, K), RAW).bfloat16()
    apart, on_its_way = (
        plan_with(split, 2, N, K, "bf16", H200, layer.prepares, reason="")
        for split in SPLITS.values()
    )
    run_plan(apart, x, layer)
    assert launched == [
        ("quantize", RAW, layer.input_scale, layer.rotation),
        ("linear_small_bf16_w12", PREPARED, 0),
    ]
    assert bool((x == RAW).all())
    launched.clear()
    run_plan(on_its_way, x, layer)
    assert launched == [("linear_small_bf16_w12_s", RAW, bits)]


@pytest.mark.parametrize("split", SPLITS)
def test_x_that_is_prepared_already_is_left_alone(launched, split):
    layer = layer_that(rotates=True, rounds=True)
    plan = plan_with(SPLITS[split], 2, N, K, "bf16", H200, True, reason="")
    run_plan(plan, torch.full((2, K), PREPARED).bfloat16(), layer, prepared=True)
    assert launched == [(plan.kernel, PREPARED, 0)]


@pytest.mark.parametrize("split", SPLITS)
def test_nothing_is_prepared_where_nothing_has_to_be(launched, split):
    layer = layer_that(rotates=False, rounds=False)
    plan = plan_with(SPLITS[split], 2, N, K, "bf16", H200, layer.prepares, reason="")
    run_plan(plan, torch.full((2, K), RAW).bfloat16(), layer)
    assert launched == [(plan.kernel, RAW, 0)]


@pytest.fixture
def large_launched(launched, monkeypatch):
    """The same for linear_large: what is launched, for how many tokens, what is left to do to x."""

    def put(index, first, second):
        (arrange, of_arrange), (product, of_product) = first, second
        _, arranged, _, *sizes = launches._ARRANGE.unpack(of_arrange)
        tiles, x, *_ = launches._LARGE.unpack(of_product)
        assert x == arranged != tiles
        launched.append((arrange, *sizes))
        launched.append((product, *launches._LARGE.unpack(of_product)[6:]))

    named = SimpleNamespace(
        kernel=lambda name: SimpleNamespace(configured=lambda **_: name), late_trigger=False
    )
    monkeypatch.setattr(launches, "load_module", lambda index: named)
    monkeypatch.setattr(launches, "_put", put)
    with forgotten_launches():
        yield launched


def run_large(layer: Layer) -> None:
    split = LargeSplit(8, 2, 2, 1, 1, 2, 4)
    device = replace(H200, has_wgmma=True)
    plan = plan_with(split, 40, N, K, "bf16", device, layer.prepares, reason="")
    run_plan(plan, torch.full((40, K), RAW).bfloat16(), layer)


@pytest.mark.parametrize(("rotates", "rounds", "bits"), [(0, 0, 0), (1, 0, 1), (1, 1, 3)])
def test_linear_large_is_given_x_arranged_and_prepared_on_the_way(
    large_launched, rotates, rounds, bits
):
    run_large(layer_that(rotates, rounds))
    assert large_launched == [
        ("arrange_bf16", 40, K, bits),
        ("linear_large_bf16_n8_r2", 40, N, K, 3, 2, 2, 4, 2),
    ]
