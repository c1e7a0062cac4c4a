"""Errors of stored weights against scalar arithmetic, and the command over checkpoints."""

from __future__ import annotations

import json
import math
import shutil
from statistics import median

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from nvfp4r.checkpoint.dialects import SIDE_FILE
from nvfp4r.convert import quantise_checkpoint
from nvfp4r.format import unpack_codes
from nvfp4r.methods.rotation import hadamard16, quantize_rotated
from nvfp4r.quantize import quantize
from nvfp4r.reference import e2m1, e4m3
from reset.analyze.weights import method_of, weight_error
from reset.cli.analyze import app
from tests.nvfp4r.methods.llamas import saved_model

METHODS = ("rtn", "four-over-six", "brq")


def run(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, ["weights", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A source model, a checkpoint by every method, and one more of another dialect."""
    path = tmp_path_factory.mktemp("weights")
    saved_model(path / "source", dtype=torch.bfloat16)
    for method in METHODS:
        quantise_checkpoint(
            path / "source", path / f"w-{method}", method=method, dialect="compressed-tensors"
        )
    quantise_checkpoint(path / "source", path / "again", exclude=["model.layers.1.mlp"])
    return path


def by_hand(weight, stored, matrix=None):
    """Every figure, value by value, from the bit definitions."""
    codes, scales = unpack_codes(stored.codes), stored.block_scale.view(torch.uint8)
    wide = weight.double()
    if matrix is not None:
        wide = (wide.view(len(wide), -1, 16) @ matrix).view(wide.shape)
    error = norm = saturated = zeros = 0.0
    for n, row in enumerate(wide.tolist()):
        for k, w in enumerate(row):
            step = e4m3(int(scales[n, k // 16])) * float(stored.global_scale)
            code = int(codes[n, k])
            error += (e2m1(code) * step - w) ** 2
            norm += w * w
            saturated += code & 7 == 7 and abs(w) > 6 * step
            zeros += code in (0, 8)
    subnormal = sum(e4m3(byte) < 2**-6 for byte in scales.flatten().tolist())
    return math.sqrt(error / norm), saturated, zeros, subnormal


@pytest.mark.parametrize("rotation", [None, "hadamard16"])
def test_every_figure_is_that_of_scalar_arithmetic(rotation):
    torch.manual_seed(3)
    weight = (torch.randn(12, 64) * torch.logspace(-8, 0, 12).unsqueeze(1)).bfloat16()
    weight[2, 16:32] = 0
    make, matrix = quantize, None
    if rotation is not None:
        make, matrix = quantize_rotated, hadamard16(torch.float64)
    stored = make(weight)
    found = weight_error(weight, stored, rotation)
    error, saturated, zeros, subnormal = by_hand(weight, stored, matrix)
    assert found.relative_error == pytest.approx(error, rel=1e-6)
    assert found.snr_db == pytest.approx(-20 * math.log10(error), rel=1e-6)
    assert (found.saturated, found.zero_codes, found.subnormal_scales) == (
        saturated,
        zeros,
        subnormal,
    )
    assert (found.weights, found.blocks) == (768, 48)
    assert saturated and subnormal and zeros  # noqa: PT018


def test_rotated_weights_have_the_error_of_those_rotated_back():
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(4))
    stored = quantize_rotated(weight)
    matrix = hadamard16(torch.float64)
    back = (stored.dequantize(torch.float64).view(8, 2, 16) @ matrix).view(8, 32)
    error = float((back - weight.double()).norm() / weight.double().norm())
    assert weight_error(weight, stored, "hadamard16").relative_error == pytest.approx(error)
    assert weight_error(weight, stored).relative_error > 1  # the rotation is not optional


@pytest.mark.parametrize(("value", "relative"), [(0.0, 0.0), (0.5, None)])
def test_a_source_of_zeros(value, relative):
    stored = quantize(torch.full((2, 16), value))
    found = weight_error(torch.zeros(2, 16), stored)
    assert found.relative_error == relative
    assert found.snr_db is None


def test_an_exact_matrix_has_no_error():
    weight = torch.tensor([[2688.0, 224.0] * 8])  # 6 and 0.5 steps of 448
    found = weight_error(weight, quantize(weight))
    assert (found.relative_error, found.snr_db, found.saturated) == (0.0, None, 0)


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"source is \[3, 16\]"):
        weight_error(torch.zeros(3, 16), quantize(torch.ones(2, 16)))


def test_the_study_holds_every_layer_and_a_figure(folder, tmp_path):
    models = [flag for m in METHODS for flag in ("--model", folder / f"w-{m}")]
    flags = ("--source", folder / "source", *models, "--output", tmp_path / "w")
    result = json.loads(run(*flags, "--json").stdout)
    assert result == json.loads((tmp_path / "w.json").read_text())
    assert {path.name for path in tmp_path.iterdir()} == {
        *("w.json", "w.png", "w.svg", "w.methods.csv", "w.layers.csv")
    }
    assert "relative error of a layer (%)" in (tmp_path / "w.svg").read_text()
    assert result["settings"]["rotations"] == {
        "rtn": None,
        "four-over-six": None,
        "brq": "hadamard16",
    }
    assert [s["quantisation"].get("method") for s in result["sources"]] == [None, *METHODS]

    layers, rows = result["tables"]["layers"], result["tables"]["methods"]
    assert len(layers) == 3 * 14
    assert len(rows) == 3 * 8  # seven kinds of layers, and all of them
    source = load_file(folder / "source" / "model.safetensors")
    stored = quantize(source["model.layers.1.mlp.down_proj.weight"])
    wanted = by_hand(source["model.layers.1.mlp.down_proj.weight"], stored)[0]
    (one,) = [
        row
        for row in layers
        if (row["method"], row["layer"]) == ("rtn", "model.layers.1.mlp.down_proj")
    ]
    assert one["relative_error"] == pytest.approx(wanted, rel=1e-5)
    (all_layers,) = [row for row in rows if (row["kind"], row["method"]) == ("all", "rtn")]
    errors = {row["layer"]: row["relative_error"] for row in layers if row["method"] == "rtn"}
    assert all_layers["median_error"] == pytest.approx(median(errors.values()), rel=1e-5)
    assert all_layers["worst_error"] == errors[all_layers["worst_layer"]] == max(errors.values())
    assert all_layers["layers"] == 14

    shown = run(*flags[:-2]).stdout
    assert "four-over-six" in shown
    assert "median error" in shown


def test_layers_that_not_all_quantise_are_left_out(folder):
    models = ("--model", folder / "w-rtn", "--model", folder / "again")
    result = json.loads(run("--source", folder / "source", *models, "--json").stdout)
    assert result["summary"]["layers"] == 11
    assert result["summary"]["layers_not_in_all"] == 3
    # Both are rtn, so that their folders tell them apart; what they share is the same.
    layers = result["tables"]["layers"]
    errors = {
        label: [row["relative_error"] for row in layers if row["method"] == label]
        for label in ("w-rtn", "again")
    }
    assert errors["w-rtn"] == errors["again"]


def edited(folder, target, *, config=None, tensors=None):
    """A copy of the checkpoint `again` with other entries."""
    shutil.copytree(folder, target)
    if config is not None:
        for file in (target / "config.json", target / SIDE_FILE):
            file.write_text(file.read_text().replace(*config))
    if tensors is not None:
        found = load_file(target / "model.safetensors")
        save_file(found | tensors(found), target / "model.safetensors", {"format": "pt"})
    return target


def test_the_method_is_read_from_either_file(folder, tmp_path):
    copy = edited(folder / "again", tmp_path / "c")
    assert method_of(copy) == method_of(folder / "w-brq").replace("brq", "rtn") == "rtn"
    content = json.loads((copy / "config.json").read_text())
    del content["quantization_config"]
    (copy / "config.json").write_text(json.dumps(content))
    assert method_of(copy) == "rtn"
    (copy / SIDE_FILE).unlink()
    assert method_of(copy) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (('"method": "rtn"', '"method": "awq"'), "awq, which scales the weights and folds"),
        (None, "input_layernorm.weight is not that of the source"),
    ],
)
def test_folded_scales_are_refused(folder, tmp_path, config, message):
    norm = "model.layers.0.input_layernorm.weight"
    tensors = None if config else lambda found: {norm: found[norm] * 1.5}
    copy = edited(folder / "again", tmp_path / "awq", config=config, tensors=tensors)
    flags = ("--source", folder / "source", "--model", folder / "w-rtn", "--model", copy)
    refused = run(*flags, "--output", tmp_path / "w", code=2)
    assert message in refused.stderr
    assert "reset-analyze perplexity" in refused.stderr
    assert not list(tmp_path.glob("w.*"))


def test_sources_and_models_that_do_not_fit(folder, tmp_path):
    rtn, other = folder / "w-rtn", tmp_path / "other"
    saved_model(other, kv_heads=2)
    assert "is a quantised model" in run("--source", rtn, "--model", rtn, code=2).stderr
    refused = run("--source", other, "--model", rtn, code=2).stderr
    assert "self_attn.k_proj.weight is [64, 64], in the source [32, 64]" in refused
    flags = ("--source", folder / "source", "--model")
    assert "no such folder" in run(*flags, tmp_path / "none", code=2).stderr
    assert "twice" in run(*flags, rtn, "--model", rtn, code=2).stderr
    assert "is not a quantised checkpoint" in run(*flags, folder / "source", code=2).stderr
    missing = ("--output", tmp_path / "no" / "x")
    assert "create it first" in run(*flags, rtn, *missing, code=2).stderr
