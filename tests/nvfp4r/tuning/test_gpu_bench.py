"""`nvfp4r bench` on a GPU: a small shape measured, tuned, and every plan that is tried is right."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from nvfp4r.cli import app
from nvfp4r.jit import load_module
from nvfp4r.launches import Layer, plan_for, required_facts, run_plan, tuned_plans
from nvfp4r.ops import linear
from nvfp4r.packed import PackedWeight, pack, unpack
from nvfp4r.plan import TOKEN_RANGES, choose_plan, plan_with, token_range
from nvfp4r.plan.tuned import Problem, Tuned
from nvfp4r.quantize import quantize
from nvfp4r.tuning.bench import job_candidates, require_machine, require_tuned_file, tuning_jobs
from nvfp4r.tuning.candidates import candidate_plans
from nvfp4r.tuning.matrix import Matrix, Product
from nvfp4r.tuning.shapes import Shape
from nvfp4r.tuning.timing import rotated_bytes

pytestmark = pytest.mark.gpu
N, K = 1032, 1104  # neither whole row tiles nor whole blocks of columns
SHAPE = f"{N}x{K}"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Tuned plans go to a folder of the test's; the kernels are loaded from theirs before."""
    load_module(0)
    monkeypatch.setenv("NVFP4R_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("NVFP4R_TUNED_PLANS", raising=False)
    tuned_plans.cache_clear()
    yield
    tuned_plans.cache_clear()


def run_json(*arguments: str) -> list[dict]:
    result = CliRunner().invoke(app, ["bench", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("activations", ["none", "nvfp4"])
def test_a_shape_is_measured(dtype, activations):
    flags = ("--dtype", dtype, "--activations", activations)
    lines = run_json("--shape", SHAPE, "--tokens", "1,16,100,200", *flags)
    assert [line["M"] for line in lines] == [1, 16, 100, 200]
    large = required_facts(0).has_wgmma
    above = ["large", "large"] if large else ["medium", "unpack"]
    assert [line["plan"]["path"] for line in lines] == ["small", "medium", *above]
    for line in lines:
        assert 0 < line["p10_us"] <= line["median_us"] <= line["p90_us"]
        assert 0 < line["of_read"] <= 1.05
        assert line["dense_us"] > 0
        assert line["gpu"] == torch.cuda.get_device_name(0)
        assert line["rotated_bytes"] >= 256_000_000


def test_a_shape_is_tuned_and_the_ops_follow():
    lines = run_json("--tune", "--shape", SHAPE, "--tokens", "8,16")
    tunings, measured = lines[:2], lines[2:]
    assert [tuning["range"] for tuning in tunings] == [[3, 8], [9, 16]]
    for tuning, line in zip(tunings, measured, strict=True):
        assert tuning["tried"] > 0
        assert tuning["wrong"] == []
        kept = line["plan"]["reason"].startswith("tuned on this GPU")
        assert kept == tuning["is_kept"] == (tuning["best_us"] <= 0.97 * tuning["default_us"])
        if kept:
            assert line["plan"]["split"] == tuning["best"]["split"]
    file = require_tuned_file(require_machine())
    assert len(file.read()) == sum(tuning["is_kept"] for tuning in tunings)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("bounds", TOKEN_RANGES)
def test_every_candidate_gives_the_product(bounds, quantised):
    """Within the float32-sum bound of float64 for the first, an odd and the last M of a range."""
    product = Product(torch.bfloat16, quantised)
    matrix = Matrix(Shape("", N, K), product, rotated_bytes(0))
    tokens = (bounds[0], bounds[1] - 1, bounds[1])
    (job,) = tuning_jobs([matrix.shape], tokens)
    ways = job_candidates(job, product, required_facts(0))
    assert ways
    ran = 0
    for plans in ways:
        if not all(matrix.can_run(plan) for plan in plans):
            continue
        ran += 1
        for M, plan in zip(tokens, plans, strict=True):
            assert matrix.plan_excess(plan, M) <= 1, plan
    assert ran > len(ways) // 2


def small_layer() -> tuple[torch.Tensor, Layer]:
    generator = torch.Generator().manual_seed(0)
    packed = pack(quantize(torch.randn(N, K, generator=generator)).to("cuda"), "bf16")
    x = torch.randn(64, K, generator=generator).bfloat16().cuda()
    return x, Layer(packed.tiles, packed.alpha, None, None, N, K, "bf16")


@pytest.mark.parametrize("bounds", TOKEN_RANGES)
def test_k7_a_row_does_not_depend_on_m_under_any_candidate(bounds):
    x, layer = small_layer()
    first, last = bounds
    of_first, of_last = (candidate_plans(M, N, K, "bf16", required_facts(0)) for M in bounds)
    for few, many in zip(of_first, of_last, strict=True):
        together = run_plan(many, x[:last], layer)
        assert torch.equal(run_plan(few, x[:first], layer), together[:first]), few


@pytest.mark.parametrize("M", [3, 12, 40])
def test_the_ops_launch_a_tuned_plan(M):
    """Its own bits, and close to the rule's: two results, each within its bound of the truth."""
    x, layer = small_layer()
    x, facts = x[:M], required_facts(0)
    rule = choose_plan(M, N, K, "bf16", facts)
    others = [
        plan
        for plan in candidate_plans(M, N, K, "bf16", facts)
        if plan.kernel != rule.kernel or plan.grid != rule.grid
    ]
    split = others[0].split
    problem = Problem(token_range(M), N, K, "bf16", False)
    require_tuned_file(require_machine()).write({problem: Tuned(split, 1.0, 2.0)}, None)
    tuned_plans.cache_clear()
    plan = plan_for(M, N, K, "bf16", facts, 0)
    assert plan.split == split
    y = linear(x, *layer)
    again = plan_with(split, M, N, K, "bf16", facts, reason="")
    assert torch.equal(y, run_plan(again, x, layer))
    by_the_rule = run_plan(rule, x, layer).double()
    dense = x.double().abs() @ dequantised(layer).abs().T
    limit = 2 * (2**-8 * by_the_rule.abs() * 1.01 + K * 2**-23 * dense)
    assert bool(((y.double() - by_the_rule).abs() <= limit).all())


def dequantised(layer: Layer) -> torch.Tensor:
    packed = PackedWeight(layer.tiles, layer.alpha, layer.N, layer.K, "bf16")
    return unpack(packed).dequantize(torch.float32).double()
