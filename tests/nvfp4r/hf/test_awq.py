"""AWQ through NVIDIA Model-Optimizer, on two-layer models.

Those that search are marked `modelopt`.
"""

from __future__ import annotations

import logging
import sys
from functools import partial

import pytest
import torch

from nvfp4r.convert import convert
from nvfp4r.format import NVFP4Tensor
from nvfp4r.hf import load_model
from nvfp4r.hf.awq import _load, _packs, _require_exact_folds, _run, awq_tensors
from nvfp4r.methods.folding import fold_points
from nvfp4r.quantize import quantize
from tests.nvfp4r.methods.llamas import layer_inputs, logits, plan_of, saved_model, token_rows
from tests.nvfp4r.methods.test_folding import folded_model

ROWS = partial(token_rows, 60, 45, 80)


@pytest.mark.modelopt
@pytest.mark.parametrize("activations", ["none", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_awq_leaves_the_model_and_lowers_output_errors(tmp_path, dtype, activations):
    model = saved_model(tmp_path, dtype=dtype)
    plan, rows, progress = plan_of(tmp_path), ROWS(), []
    stored, input_amax = awq_tensors(
        plan, rows, progress=lambda *call: progress.append(call), activations=activations
    )
    assert progress == [(1, 13), (2, 13), (13, 13)]
    assert len(stored.folds.columns) >= 10  # of 14 layers

    changed = folded_model(model, stored.folds)
    before, after = logits(model, rows[0]), logits(changed, rows[0])
    assert (after - before).norm() <= 1e-5 * before.norm()

    inputs, scaled_inputs = layer_inputs(model, rows), layer_inputs(changed, rows)
    if activations == "nvfp4":
        for name, x in scaled_inputs.items():
            assert float(input_amax[name]) == pytest.approx(float(x.abs().amax()), rel=1e-5)
        return
    assert input_amax is None
    groups = {name: group for group in plan.groups for name in group}
    for name in plan.quantised:
        x, scaled_x = inputs[name].double(), scaled_inputs[name].double()
        weight = plan.tensors.get(f"{name}.weight")
        members = [plan.tensors.get(f"{m}.weight") for m in groups.get(name, (name,))]
        scale = quantize(torch.cat(members)).global_scale
        plain = quantize(weight, global_scale=scale).dequantize(torch.float64)
        ready = stored(f"{name}.weight", weight)
        assert isinstance(ready, NVFP4Tensor)
        result = scaled_x @ ready.dequantize(torch.float64).T
        result *= stored.folds.rows.get(name, torch.ones(len(weight))).double()
        wanted = x @ weight.double().T
        error, plain_error = (result - wanted).norm(), (x @ plain.T - wanted).norm()
        assert error <= plain_error * (1 if name in stored.folds.columns else 1 + 1e-6)


@pytest.mark.modelopt
def test_the_checkpoint_is_an_ordinary_one(tmp_path, caplog):
    model = saved_model(tmp_path / "source", kv_heads=2)
    plan = plan_of(tmp_path / "source")
    with caplog.at_level(logging.WARNING, "nvfp4r.hf.awq"):
        stored, _ = awq_tensors(plan, ROWS())
    assert "scale 1 for model.layers.*.self_attn.o_proj x 2: heads are grouped" in caplog.text
    assert set(stored.unscaled) | set(stored.folds.columns) == set(plan.quantised)
    convert(plan, tmp_path / "awq", None, method="awq", stored=stored)
    loaded = load_model(tmp_path / "awq")

    truth = folded_model(model, stored.folds)
    with torch.no_grad():
        for name in plan.quantised:
            original = plan.tensors.get(f"{name}.weight")
            weight = stored(f"{name}.weight", original).dequantize(torch.float32)
            truth.get_submodule(name).weight.copy_(weight)
    row = token_rows(30)[0]
    torch.testing.assert_close(logits(loaded, row), logits(truth, row), rtol=1e-5, atol=1e-5)


def test_packed_rows_are_as_if_alone(tmp_path):
    model = saved_model(tmp_path)
    rows = token_rows(7, 12)
    (pack,) = _packs(rows)
    alone = logits(model, rows[1])[-1]
    torch.testing.assert_close(_run(model, pack)[0, -1].double(), alone, rtol=1e-5, atol=1e-5)


def test_long_rows_are_batches_of_their_own():
    lengths = (1500, 600, 1400, 3000, 5)
    assert [pack[0].shape[1] for pack in _packs(token_rows(*lengths))] == [1500, 2000, 3000, 5]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_exact_folds_are_recognised_and_undone(tmp_path, kind):
    saved_model(tmp_path, kind)
    plan = plan_of(tmp_path)
    model = _load(plan, torch.device("cpu"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _require_exact_folds(model, fold_points(plan), token_rows(20)[0])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_norms_that_add_one_are_refused_before_the_search(tmp_path, monkeypatch):
    saved_model(tmp_path, "gemma")
    monkeypatch.setattr("nvfp4r.hf.awq.require_modelopt", lambda: None)
    with pytest.raises(ValueError, match="scales folded into its norms and rows change"):
        awq_tensors(plan_of(tmp_path), ROWS())


def test_no_token_is_refused(tmp_path, monkeypatch):
    saved_model(tmp_path)
    monkeypatch.setattr("nvfp4r.hf.awq.require_modelopt", lambda: None)
    with pytest.raises(ValueError, match="calibration got no token at all"):
        awq_tensors(plan_of(tmp_path), [torch.empty(0, dtype=torch.int64)])


def test_nan_in_calibration_is_refused_before_the_search(tmp_path, monkeypatch):
    model = saved_model(tmp_path)
    with torch.no_grad():
        model.model.embed_tokens.weight[7, 0] = float("nan")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("nvfp4r.hf.awq.require_modelopt", lambda: None)
    rows = [torch.tensor([3, 4, 5]), torch.tensor([3, 7, 5])]
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj: its input holds NaN"):
        awq_tensors(plan_of(tmp_path), rows)


def test_a_missing_package_is_named_before_anything_is_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelopt.torch.quantization", None)
    monkeypatch.setitem(sys.modules, "modelopt", None)
    with pytest.raises(ImportError, match=r"pip install 'nvidia-modelopt>=0\.47'"):
        awq_tensors(None, [])


def test_an_old_package_is_named_before_anything_is_read(monkeypatch):
    monkeypatch.setattr("nvfp4r.hf.awq._modelopt", lambda: None)
    monkeypatch.setattr("nvfp4r.hf.awq.version", lambda name: "0.9.1rc2")
    with pytest.raises(ImportError, match=r"0\.47 or newer, found 0\.9\.1rc2"):
        awq_tensors(None, [])
