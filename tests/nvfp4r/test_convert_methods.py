"""Converting by method: values, shared scales, equal bytes, and tensors that are handed over."""

from __future__ import annotations

import json
import math
import os
import threading
import time

import pytest
import torch

from nvfp4r import reference
from nvfp4r.checkpoint import load_checkpoint
from nvfp4r.convert import convert, quantise_checkpoint, weight_maxima
from nvfp4r.format import NVFP4Tensor, unpack_codes
from nvfp4r.methods import METHODS, check_method
from nvfp4r.methods.rotation import rotate
from nvfp4r.quantize import quantize
from nvfp4r.selection import plan_conversion
from tests.nvfp4r.sources import llama_tensors, write_source
from tests.nvfp4r.test_convert import group_amax, modules

FREE = [name for name, method in METHODS.items() if not method.calibrated]
CALIBRATED = [name for name, method in METHODS.items() if method.calibrated]
CT = "compressed-tensors"
UP_PROJ = "model.layers.0.mlp.up_proj.weight"


def dialects_of(method):
    return [CT] if METHODS[method].rotation else ["modelopt", CT]


PAIRS = [(method, dialect) for method in FREE for dialect in dialects_of(method)]


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path / "source", llama_tensors())


def test_the_methods_are_those_that_users_are_told():
    names = ["rtn", "four-over-six", "brq", "gptq", "mr-gptq", "awq"]
    assert list(METHODS) == names
    assert names[3:] == CALIBRATED
    assert [name for name in names if METHODS[name].rotation] == ["brq", "mr-gptq"]
    for name in names:
        assert check_method(name) is METHODS[name]
        assert METHODS[name].name == name
    with pytest.raises(
        ValueError, match=r"'4/6', need one of rtn, four-over-six, brq, gptq, .*awq"
    ):
        check_method("4/6")


def wanted(method, weight, scale):
    """Codes and block scale bytes by the slow code."""
    if method == "four-over-six":
        return reference.quantize_four_over_six(weight, scale)
    return reference.quantize(rotate(weight) if method == "brq" else weight, scale)[:2]


@pytest.mark.parametrize(("method", "dialect"), PAIRS)
def test_every_module_equals_the_reference(tmp_path, source, method, dialect):
    """Also that fused groups share one global scale, made of what is quantised: for brq, of the
    rotated weights."""
    tensors = llama_tensors()
    report = quantise_checkpoint(source, tmp_path / "out", method=method, dialect=dialect)
    assert (report.modules, report.inexact_divisors) == (14, 0)
    checkpoint = load_checkpoint(tmp_path / "out")
    quantised_values = tensors
    if method == "brq":
        quantised_values = {f"{m}.weight": rotate(tensors[f"{m}.weight"]) for m in modules()}
    unit = 1536 if method == "four-over-six" else 2688
    for module in modules():
        quantised = checkpoint[f"{module}.weight"]
        scale = torch.tensor(group_amax(quantised_values, module) / unit)
        steps = quantised.global_scale.view(torch.int32) - scale.view(torch.int32)
        assert abs(int(steps)) <= 1
        codes, scale_bytes = wanted(method, tensors[f"{module}.weight"], quantised.global_scale)
        assert torch.equal(unpack_codes(quantised.codes), codes)
        assert torch.equal(quantised.block_scale.view(torch.uint8), scale_bytes)
    groups = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]
    for group in groups:
        members = [m for m in modules() if m.startswith("model.layers.1.") and m.endswith(group)]
        assert len(members) == len(group)
        assert len({float(checkpoint[f"{m}.weight"].global_scale) for m in members}) == 1


@pytest.mark.parametrize("method", FREE)
def test_the_method_and_its_rotation_are_recorded(tmp_path, source, method):
    quantise_checkpoint(source, tmp_path / "out", method=method, dialect=CT)
    block = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert block["producer"]["method"] == method
    assert load_checkpoint(tmp_path / "out").rotation == METHODS[method].rotation


def test_both_dialects_hold_the_same_matrices(tmp_path, source):
    for dialect in ("modelopt", CT):
        quantise_checkpoint(source, tmp_path / dialect, method="four-over-six", dialect=dialect)
    one, other = (load_checkpoint(tmp_path / dialect) for dialect in ("modelopt", CT))
    for module in modules():
        matrices = [checkpoint[f"{module}.weight"].dequantize() for checkpoint in (one, other)]
        assert torch.equal(*matrices)


@pytest.mark.parametrize("method", FREE)
def test_threads_do_not_change_the_bytes(tmp_path, source, method, monkeypatch):
    for threads in (1, 4):
        monkeypatch.setattr(os, "cpu_count", lambda count=threads: count)
        out = tmp_path / f"{threads}"
        quantise_checkpoint(source, out, method=method, dialect=CT, max_shard_bytes=8192)
    files = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert len(files) > 3
    assert files == sorted(path.name for path in (tmp_path / "4").iterdir())
    for name in files:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "4" / name).read_bytes()


@pytest.mark.parametrize("method", FREE)
def test_all_methods_take_the_same_room(tmp_path, source, method):
    plan = plan_conversion(source)
    report = quantise_checkpoint(source, tmp_path / "out", method=method, dialect=CT)
    matrices = [load_checkpoint(tmp_path / "out")[f"{module}.weight"] for module in modules()]
    expected = sum(info.shape[0] * info.shape[1] * 9 // 16 + 4 for info in plan.quantised.values())
    assert sum(matrix.nbytes for matrix in matrices) == expected
    assert report.modules == len(matrices)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("method", FREE)
@pytest.mark.parametrize("name", [UP_PROJ, "model.norm.weight"])
def test_a_value_that_is_not_finite_is_named_and_nothing_is_written(tmp_path, method, name, value):
    tensors = llama_tensors()
    tensors[name].view(-1)[5] = value
    source = write_source(tmp_path / "source", tensors)
    with pytest.raises(ValueError, match=rf"{name} holds 1 NaN or infinite values of \d+, .*5\]"):
        quantise_checkpoint(source, tmp_path / "out", method=method, dialect=CT)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_weights_too_large_to_be_rotated_are_named(tmp_path):
    tensors = llama_tensors()
    tensors[UP_PROJ][2, 3] = 1e38
    source = write_source(tmp_path / "source", tensors)
    with pytest.raises(ValueError, match=rf"{UP_PROJ}: weights reach .*e\+37, need 2.13e\+37"):
        quantise_checkpoint(source, tmp_path / "out", method="brq", dialect=CT)


@pytest.mark.parametrize("method", CALIBRATED)
def test_methods_that_run_the_model_are_refused_with_what_runs_them(tmp_path, method):
    """Before anything is read: there is no source."""
    message = rf"need one of rtn, four-over-six, brq here; use reset-quantize --method {method} "
    with pytest.raises(ValueError, match=message):
        quantise_checkpoint(tmp_path / "none", tmp_path / "out", method=method, dialect=CT)


def test_a_rotation_that_the_dialect_cannot_say_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ValueError, match=r"'brq' rotates .*\(--format compressed-tensors\)"):
        quantise_checkpoint(tmp_path / "none", tmp_path / "out", method="brq", dialect="modelopt")


class Source:
    """What a calibrated method hands over: weights by another rule, one norm changed."""

    def __init__(self, **changes):
        self.changes = changes
        self.names, self.active, self.most_active = [], 0, 0
        self.lock = threading.Lock()

    def __call__(self, name, tensor):
        with self.lock:
            self.active += 1
            self.most_active = max(self.most_active, self.active)
            self.names.append(name)
        time.sleep(0.002)  # so that calls side by side would be seen
        ready = tensor
        if name in self.changes:
            ready = self.changes[name]
        elif name.endswith("_proj.weight"):
            ready = quantize(tensor, global_scale=torch.tensor(0.25))
        elif name == "model.norm.weight":
            ready = tensor * 2
        with self.lock:
            self.active -= 1
        return ready


def test_ready_tensors_are_written_as_they_are(tmp_path, source, monkeypatch):
    """Asked for once each, in order and one at a time, whatever the machine has."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    tensors = llama_tensors()
    stored = Source()
    plan = plan_conversion(source)
    convert(plan, tmp_path / "out", None, method="gptq", stored=stored)
    assert stored.names == list(plan.tensors.infos)
    assert stored.most_active == 1
    checkpoint = load_checkpoint(tmp_path / "out")
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            expected = quantize(tensor, global_scale=torch.tensor(0.25))
            assert torch.equal(checkpoint[name].codes, expected.codes)
            assert float(checkpoint[name].global_scale) == 0.25
        else:
            factor = 2 if name == "model.norm.weight" else 1
            assert torch.equal(checkpoint[name], tensor * factor)
    block = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert block["producer"]["method"] == "gptq"


def test_ready_tensors_of_a_rotated_method_say_so(tmp_path, source):
    plan = plan_conversion(source)
    amax = {module: torch.tensor(1.0) for module in modules()}
    arguments = {"dialect": CT, "activations": "nvfp4", "input_amax": amax}
    convert(plan, tmp_path / "out", None, method="mr-gptq", stored=Source(), **arguments)
    checkpoint = load_checkpoint(tmp_path / "out")
    assert checkpoint.rotation == "hadamard16"
    assert float(checkpoint.input_scale(modules()[0])) == pytest.approx(1 / 2688, rel=2**-23)


MATRIX = quantize(torch.ones(48, 32))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (UP_PROJ, torch.ones(48, 32), r"torch.float32 \[48, 32\], need NVFP4Tensor \[48, 32\]"),
        (UP_PROJ, quantize(torch.ones(32, 32)), r"\[32, 32\], need NVFP4Tensor \[48, 32\]"),
        (UP_PROJ, None, r"NoneType, need NVFP4Tensor"),
        ("model.norm.weight", MATRIX, r"NVFP4Tensor \[48, 32\], need torch.bfloat16 \[32\]"),
        ("model.norm.weight", torch.ones(16).bfloat16(), r"\[16\], need torch.bfloat16 \[32\]"),
        ("model.norm.weight", torch.ones(32), r"torch.float32 \[32\], need torch.bfloat16"),
        (
            "model.norm.weight",
            torch.full((32,), math.nan).bfloat16(),
            r"'gptq' gave NaN or infinite values",
        ),
        (
            UP_PROJ,
            NVFP4Tensor(MATRIX.codes, MATRIX.block_scale, torch.tensor(math.nan)),
            r"global_scale is nan",
        ),
    ],
)
def test_ready_tensors_that_do_not_fit_are_named(tmp_path, source, name, tensor, message):
    stored = Source(**{name: tensor})
    with pytest.raises(ValueError, match=rf"{name}: .*{message}"):
        convert(plan_conversion(source), tmp_path / "out", None, method="gptq", stored=stored)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "gptq"}, r"'gptq' runs the model .* --method gptq --calib-data, or .*`stored`"),
        ({"method": "rtn", "stored": Source()}, r"'rtn' makes its tensors from the weights alone"),
        ({"method": "rtn"}, r"'rtn' needs the largest weight of each .* 14: model.*weight_maxima"),
        ({"method": "brq"}, r"'brq' rotates the inputs"),
        ({"method": "mr-gptq", "stored": Source()}, r"'mr-gptq' rotates the inputs"),
        ({"method": "awk"}, r"method is 'awk', need one of rtn"),
    ],
)
def test_what_does_not_go_together_is_refused_before_writing(tmp_path, source, arguments, message):
    with pytest.raises(ValueError, match=message):
        convert(plan_conversion(source), tmp_path / "out", None, **arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["rtn", "gptq", "brq", "mr-gptq"])
def test_maxima_are_those_of_what_is_quantised(source, method):
    tensors = llama_tensors()
    weights = {f"{m}.weight": tensors[f"{m}.weight"].float() for m in modules()}
    if METHODS[method].rotation:
        weights = {name: rotate(weight) for name, weight in weights.items()}
    maxima = weight_maxima(plan_conversion(source), method=method)
    assert maxima == {module: group_amax(weights, module) for module in modules()}
