"""Scales on inputs: where they can go, that they change nothing, and which of them are kept."""

from __future__ import annotations

import copy

import pytest
import torch

from nvfp4r.format import NVFP4Tensor
from nvfp4r.methods.awq import ALL_ZERO, NO_GAIN, AwqTensors, InputStatistics, choose
from nvfp4r.methods.folding import Folds, divided_norm, fold_points
from nvfp4r.quantize import quantize
from nvfp4r.selection import plan_conversion
from tests.nvfp4r.methods.llamas import layer_inputs, logits, plan_of, saved_model, token_rows


def points_of(plan):
    return {point.readers: point for point in fold_points(plan)}


def random_scales(plan, points):
    """Scales from 1/4 to 4, as no search would choose them."""
    generator = torch.Generator().manual_seed(2)
    widths = {point.readers[0]: plan.quantised[point.readers[0]].shape[1] for point in points}
    return {n: 4 ** (2 * torch.rand(K, generator=generator) - 1) for n, K in widths.items()}


def useful_scales(model, plan, points, rows):
    """Square roots of the channels' mean magnitudes: a fair choice, without a search."""
    inputs = layer_inputs(model, rows)
    means = {p.readers[0]: inputs[p.readers[0]].abs().mean(0) for p in points}
    return {name: (mean / mean.median()).clamp(min=1e-3).sqrt() for name, mean in means.items()}


def statistics_of(model, points, rows):
    watched = {p.readers[0]: model.get_submodule(p.readers[0]) for p in points}
    with InputStatistics(watched, sum(map(len, rows))) as statistics, torch.no_grad():
        for row in rows:
            model(input_ids=row.unsqueeze(0), use_cache=False)
    return statistics


def folds_everywhere(plan, scales):
    """Every scale folded in, whether or not it helps."""
    folds = Folds({}, {}, {})
    for point in fold_points(plan):
        if point.obstacle is not None:
            continue
        scale = scales[point.readers[0]]
        if point.kind == "norm":
            weight = plan.tensors.get(f"{point.taker}.weight")
            folds.norms[point.taker], scale = divided_norm(weight, scale)
        else:
            folds.rows[point.taker] = scale
        folds.columns.update(dict.fromkeys(point.readers, scale))
    return folds


def folded_model(model, folds):
    """The model with float32 weights that carry the scales."""
    result = copy.deepcopy(model)
    with torch.no_grad():
        for name in {*folds.columns, *folds.rows}:
            weight = result.get_submodule(name).weight
            weight.copy_(folds.applied(name, weight))
        for name, weight in folds.norms.items():
            result.get_submodule(name).weight.copy_(weight)
    return result


@pytest.mark.parametrize(
    ("kind", "kv_heads", "folded"),
    [("llama", 4, 4), ("llama", 2, 3), ("qwen2", 4, 3), ("qwen3", 2, 3)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folded_scales_leave_the_model_as_it_was(tmp_path, kind, kv_heads, folded, dtype):
    model = saved_model(tmp_path, kind, kv_heads=kv_heads, dtype=dtype)
    plan = plan_of(tmp_path)
    points = fold_points(plan)
    assert [p.obstacle is None for p in points].count(True) == 2 * folded
    folds = folds_everywhere(plan, random_scales(plan, points))
    changed = folded_model(model, folds)
    row = token_rows(40)[0]
    before, after = logits(model, row), logits(changed, row)
    # Each product has two or three more float32 roundings of 2**-24; sums and layers add up.
    assert (after - before).norm() <= 1e-5 * before.norm()
    assert not torch.equal(after, before)


def test_what_nothing_can_take_is_named(tmp_path):
    saved_model(tmp_path / "grouped", kv_heads=2)
    saved_model(tmp_path / "biased", "qwen2")
    attention = ("model.layers.0.self_attn.o_proj",)
    mlp = ("model.layers.1.mlp.down_proj",)
    grouped = points_of(plan_of(tmp_path / "grouped"))
    assert "heads are grouped: 32 outputs" in grouped[attention].obstacle
    assert grouped[mlp].obstacle is None
    assert "v_proj has a bias" in points_of(plan_of(tmp_path / "biased"))[attention].obstacle
    without_up = points_of(plan_of(tmp_path / "grouped", "*.gate_up_proj"))
    assert "up_proj is not quantised" in without_up[mlp].obstacle
    assert not any("gate_proj" in name for readers in without_up for name in readers)


@pytest.mark.parametrize(
    ("renamed", "message"),
    [
        ({"mlp.up_proj": "mlp.experts.0.up_proj"}, "experts.0.up_proj: awq cannot scale"),
        ({"post_attention_layernorm": "mlp_norm"}, "needs a tensor post_attention_layernorm"),
        ({"self_attn.q_norm": "self_attn.sub_norm"}, "sub_norm.weight: awq knows"),
        ({"self_attn.q_norm.weight": "input_layernorm.bias"}, "need.*norms without a bias"),
    ],
)
def test_other_architectures_are_refused_by_name(tmp_path, renamed, message):
    from safetensors.torch import load_file, save_file

    saved_model(tmp_path, "qwen3")
    file = tmp_path / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    save_file(tensors, file)
    with pytest.raises(ValueError, match=message):
        fold_points(plan_of(tmp_path))


def test_a_quantised_head_is_refused(tmp_path):
    saved_model(tmp_path)
    with pytest.raises(ValueError, match=r"lm_head: awq cannot .* leave --quantize-lm-head out"):
        fold_points(plan_conversion(tmp_path, quantise_head=True))


def test_a_divided_norm_knows_what_it_was_divided_by():
    weight = torch.tensor([1.0, -0.3, 0.0, 1e-38, 3e38], dtype=torch.bfloat16)
    scale = torch.tensor([3.0, 0.7, 5.0, 1e30, 1e-30])
    divided, exact = divided_norm(weight, scale)
    assert divided.dtype == torch.bfloat16
    torch.testing.assert_close(
        divided.double() * exact.double(), weight.double(), rtol=2**-23, atol=0
    )
    # A zero channel stays one; what would leave the range of bfloat16 is not divided.
    assert exact[2:].tolist() == [1, 1, 1]
    assert exact[0] != 3.0
    torch.testing.assert_close(exact[:2], scale[:2], rtol=2**-8, atol=0)


@pytest.mark.parametrize("activations", ["none", "nvfp4"])
def test_chosen_scales_make_no_layer_worse(tmp_path, activations):
    model = saved_model(tmp_path)
    plan, rows = plan_of(tmp_path), token_rows(50, 30)
    points = fold_points(plan)
    scales = useful_scales(model, plan, points, rows)
    outcome = choose(plan, points, scales, statistics_of(model, points, rows), activations)
    assert set(outcome.errors) == set(plan.quantised)
    better = [name for name, (plain, chosen) in outcome.errors.items() if chosen < plain]
    assert all(chosen <= plain for plain, chosen in outcome.errors.values())
    assert len(better) >= 7  # of 14; loud channels are what scales are for
    assert set(outcome.unscaled) | set(outcome.folds.columns) == set(plan.quantised)

    # The same by hand, in float64, from what would be stored.
    stored = AwqTensors(plan, outcome)
    inputs = layer_inputs(model, rows)
    changed = layer_inputs(folded_model(model, outcome.folds), rows)
    for name in plan.quantised:
        amax = float(changed[name].abs().amax())
        assert float(outcome.input_amax[name]) == pytest.approx(amax, rel=1e-5)
        if activations == "nvfp4":
            continue
        tensor = stored(f"{name}.weight", plan.tensors.get(f"{name}.weight"))
        assert isinstance(tensor, NVFP4Tensor)
        weight = plan.tensors.get(f"{name}.weight").double()
        result = changed[name].double() @ tensor.dequantize(torch.float64).T
        if name in outcome.folds.rows:
            result *= outcome.folds.rows[name].double()
        wanted = inputs[name].double() @ weight.T
        error = float((result - wanted).square().sum() / wanted.square().sum())
        assert error == pytest.approx(outcome.errors[name][1], rel=1e-4)


def test_scales_that_do_harm_are_not_kept(tmp_path):
    model = saved_model(tmp_path)
    plan, rows = plan_of(tmp_path), token_rows(40)
    points = fold_points(plan)
    scales = {n: s**4 for n, s in random_scales(plan, points).items()}
    outcome = choose(plan, points, scales, statistics_of(model, points, rows))
    dropped = [name for name, reason in outcome.unscaled.items() if reason == NO_GAIN]
    assert len(dropped) >= 7
    stored = AwqTensors(plan, outcome)
    groups = {name: group for group in plan.groups for name in group}
    for name in dropped:
        if name in outcome.folds.rows:
            continue
        members = [plan.tensors.get(f"{m}.weight") for m in groups.get(name, (name,))]
        if any(m in outcome.folds.rows for m in groups.get(name, ())):
            continue  # shares the global scale of a layer whose rows were divided
        whole = quantize(torch.cat(members))
        plain = quantize(plan.tensors.get(f"{name}.weight"), global_scale=whole.global_scale)
        kept = stored(f"{name}.weight", plan.tensors.get(f"{name}.weight"))
        assert torch.equal(kept.codes, plain.codes)


def test_inputs_that_were_all_zero_are_not_scaled(tmp_path):
    model = saved_model(tmp_path)
    with torch.no_grad():
        model.model.layers[0].post_attention_layernorm.weight.zero_()
    plan, rows = plan_of(tmp_path), token_rows(20)
    points = fold_points(plan)
    outcome = choose(plan, points, random_scales(plan, points), statistics_of(model, points, rows))
    mlp = [f"model.layers.0.mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
    assert {outcome.unscaled[name] for name in mlp} == {ALL_ZERO}


def test_nan_inputs_are_named_where_they_entered(tmp_path):
    model = saved_model(tmp_path)
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight[3, 5] = float("nan")
    points = fold_points(plan_of(tmp_path))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj: its input holds NaN"):
        statistics_of(model, points, token_rows(20)).check_finite()


def test_the_sample_is_spread_over_all_tokens():
    layer = torch.nn.Linear(16, 1)
    with InputStatistics({"layer": layer}, 1300) as statistics:
        for start in range(0, 1300, 130):
            layer(torch.arange(start, start + 130.0).unsqueeze(1).expand(130, 16))
    assert statistics.sample("layer")[:, 0].tolist() == list(range(0, 1300, 3))
