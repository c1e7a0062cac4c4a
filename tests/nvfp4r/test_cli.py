"""`nvfp4r inspect` and `nvfp4r doctor`: what they say, text and JSON, and their exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import nvfp4r
from nvfp4r.cli import app
from nvfp4r.convert import quantise_checkpoint
from tests.nvfp4r.sources import llama_tensors, write_source
from tests.nvfp4r.toy import write_toy

DIALECTS = ("modelopt", "compressed-tensors")
RUNNER = CliRunner()


def run(*arguments: object, code: int = 0):
    result = RUNNER.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def run_json(*arguments: object, code: int = 0) -> dict:
    return json.loads(run(*arguments, "--json", code=code).stdout)


@pytest.fixture
def quantised(tmp_path):
    source = write_source(tmp_path / "source", llama_tensors())
    quantise_checkpoint(source, tmp_path / "out")
    return tmp_path / "out"


def test_inspect_shows_one_line_for_repeated_layers(quantised):
    text = run("inspect", quantised).stdout
    assert text.count("model.layers.*.mlp.down_proj") == 1
    assert "model.layers.0" not in text
    assert "modelopt, W4A16" in text
    assert "14 modules, 4.5" in text
    assert "lm_head" in text
    assert "no problems" in text


def test_a_narrow_terminal_loses_columns_and_not_the_names(quantised, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = run("inspect", quantised).stdout
    assert "model.layers.*.self_attn.q_proj" in text
    assert all(len(line) <= 80 for line in text.splitlines()[:10])
    assert "for want of width, without: input scale, block scales" in text
    assert "for want of width" not in run_wide(quantised, monkeypatch)


def run_wide(quantised, monkeypatch) -> str:
    monkeypatch.delenv("COLUMNS")
    return run("inspect", quantised).stdout


def test_inspect_all_shows_every_layer(quantised):
    text = run("inspect", quantised, "--all").stdout
    for layer in (0, 1):
        assert text.count(f"model.layers.{layer}.mlp.down_proj ") == 1


@pytest.mark.parametrize("dialect", DIALECTS)
def test_inspect_figures(tmp_path, dialect):
    """Every figure of one module whose codes and scales are known."""
    row = torch.tensor([6.0, -6.0, 0.5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    weight = torch.cat((row, row / 448)).repeat(16, 1)  # block scales 448 and 1, multiplier 1
    tensors = {"h.0.o_proj.weight": weight, "h.0.norm.weight": torch.ones(4).bfloat16()}
    source = write_source(tmp_path / "source", {n: 448 * t for n, t in tensors.items()})
    amax = {"h.0.o_proj": torch.tensor(2688.0)}
    quantise_checkpoint(
        source, tmp_path / "out", dialect=dialect, activations="nvfp4", input_amax=amax
    )
    report = run_json("inspect", tmp_path / "out")
    assert (report["dialect"], report["activations"]) == (dialect, "nvfp4")
    assert report["problems"] == []
    assert report["quantised_modules"] == 1
    module = next(t for t in report["tensors"] if t["kind"] == "nvfp4")
    assert module["module"] == "h.0.o_proj"
    assert module["shape"] == [16, 32]
    assert module["nbytes"] == 16 * 32 // 2 + 16 * 2 + 4
    assert module["bits_per_parameter"] == 8 * module["nbytes"] / 512
    assert module["global_scale"] == 1.0
    assert (module["block_scale_min"], module["block_scale_max"]) == (1.0, 448.0)
    assert module["saturated_share"] == 2 / 16
    assert module["input_scale"] == 1.0
    norm = next(t for t in report["tensors"] if t["kind"] != "nvfp4")
    assert (norm["kind"], norm["bits_per_parameter"], norm["global_scale"]) == ("bf16", 16.0, None)


def test_inspect_lists_fused_layers_with_different_scales(tmp_path):
    """A2: allowed, as each row keeps its scale; the ratio is told."""

    def edit(tensors):
        for layer in (0, 1):
            for name in ("q_proj", "k_proj", "v_proj"):
                scale = torch.tensor(3.85e-5)
                tensors[f"model.layers.{layer}.self_attn.{name}.weight_scale_2"] = scale
            gate = torch.tensor(3.85e-5)
            tensors[f"model.layers.{layer}.mlp.gate_proj.weight_scale_2"] = gate
        tensors["model.layers.0.mlp.up_proj.weight_scale_2"] = torch.tensor(4.83e-5)
        tensors["model.layers.1.mlp.up_proj.weight_scale_2"] = torch.tensor(3.85e-5)

    write_toy(tmp_path / "toy", edit=edit)
    report = run_json("inspect", tmp_path / "toy")
    assert report["groups"] == 4
    (group,) = report["unequal_groups"]
    assert group["members"] == [f"model.layers.0.mlp.{x}_proj" for x in ("gate", "up")]
    text = " ".join(run("inspect", tmp_path / "toy").stdout.split())
    assert "largest ratio 1.255 in model.layers.0.mlp" in text


def test_inspect_lists_kv_scales(tmp_path):
    def edit(tensors):
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.25)

    write_toy(tmp_path / "toy", edit=edit)
    report = run_json("inspect", tmp_path / "toy")
    assert report["kv_scales"] == {"model.layers.0.self_attn.k_scale": 0.25}
    assert "1 scale, 0.25" in run("inspect", tmp_path / "toy").stdout


def damage_block_scale(tensors):
    tensors["model.layers.1.mlp.up_proj.weight_scale"].view(torch.uint8)[3, 1] = 0x7F


def remove_input_scale(tensors):
    del tensors["model.layers.1.mlp.up_proj.input_scale"]


def zero_global_scale(tensors):
    tensors["model.layers.1.mlp.up_proj.weight_scale_2"].zero_()


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (damage_block_scale, "1 of 96 NaN block scales"),
        (remove_input_scale, "input_scale is missing"),
        (zero_global_scale, "need a finite multiplier > 0"),
    ],
)
def test_inspect_names_problems_and_exits_with_1(tmp_path, edit, problem):
    write_toy(tmp_path / "toy", edit=edit)
    report = run_json("inspect", tmp_path / "toy", code=1)
    (line,) = report["problems"]
    assert "model.layers.1.mlp.up_proj" in line
    assert problem in line
    text = run("inspect", tmp_path / "toy", code=1).stdout
    assert "1 problem\n" in text
    assert line in text


def test_inspect_says_that_a_plain_model_is_not_quantised(tmp_path):
    source = write_source(tmp_path / "plain", llama_tensors())
    text = run("inspect", source, code=1).stdout
    assert f"{source}: a model that is not quantised (llama, 21 tensors, " in text
    assert f"reset-quantize --model {source} --output {source}-NVFP4" in text
    assert run_json("inspect", source, code=1)["problems"] == [text.strip()]


def test_inspect_reports_a_broken_configuration(tmp_path):
    toy = write_toy(tmp_path / "toy")
    (toy.folder / "config.json").write_text("{")
    assert "config.json: cannot be read as JSON" in run("inspect", toy.folder, code=1).stdout


def test_inspect_refuses_a_path_that_is_no_folder(tmp_path):
    result = run("inspect", tmp_path / "nothing", code=2)
    assert result.stdout == ""
    assert f"Error: {tmp_path}/nothing: no such folder" in result.stderr
    assert "Traceback" not in result.stderr


def fake_gpus(monkeypatch, *capabilities: tuple[int, int]) -> None:
    properties = [
        SimpleNamespace(name=f"GPU-{major}{minor}", major=major, minor=minor, total_memory=8 << 30)
        for major, minor in capabilities
    ]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(properties))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)


KERNELS = "CUDA kernels for small batches (torch.ops.nvfp4r)"


def test_d2_doctor_says_which_gpus_the_kernels_are_not_built_for(monkeypatch):
    fake_gpus(monkeypatch, (7, 5))
    runs, reason = parts(run_json("doctor"))[KERNELS]
    assert runs is False
    assert "7.5" in reason


def parts(diagnosis: dict) -> dict[str, tuple[bool, str]]:
    return {part["name"]: (part["runs"], part["reason"]) for part in diagnosis["parts"]}


def test_doctor_tells_versions_and_what_is_missing():
    diagnosis = run_json("doctor")
    assert diagnosis["nvfp4r"] == nvfp4r.__version__
    versions = {package["name"]: package["version"] for package in diagnosis["packages"]}
    for name in ("torch", "transformers", "safetensors"):
        assert versions[name] == metadata.version(name)
    assert diagnosis["cpu_cores"] >= 1
    assert diagnosis["basics_work"] is True
    found = parts(diagnosis)
    assert found["NVFP4 format and quantiser on the CPU"][0] is True
    assert found["transformers engine (nvfp4r.hf.load_model)"][0] is True
    assert found[KERNELS][0] is torch.cuda.is_available()


@pytest.mark.parametrize(
    ("version", "plugins", "runs", "told"),
    [
        (None, "", False, "vLLM is not installed: pip install 'reset-decoding[vllm]'"),
        ("0.34.0", "", False, "0.34.0, but nvfp4r was checked against 0.26 to 0.33 alone"),
        ("0.32.0", "other", False, "VLLM_PLUGINS is 'other'"),
        ("0.32.0", "nvfp4r", True, "it is off; nvfp4r.enable() or NVFP4R=1 switches it on"),
    ],
)
def test_d5_doctor_tells_whether_vllm_would_use_the_plugin(
    monkeypatch, version, plugins, runs, told
):
    monkeypatch.setattr("nvfp4r.vllm.versions.installed_version", lambda: version)
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    monkeypatch.delenv("NVFP4R", raising=False)
    monkeypatch.setattr(
        "nvfp4r.vllm.versions.metadata.entry_points",
        lambda group: [SimpleNamespace(name="nvfp4r")],
    )
    found, reason = parts(run_json("doctor"))["vLLM plug-in"]
    assert (found, told in reason) == (runs, True), reason


@pytest.mark.parametrize(
    ("capability", "has_fp4"),
    [((8, 0), False), ((9, 0), False), ((10, 0), True), ((12, 0), True), ((12, 1), True)],
)
def test_doctor_knows_native_fp4_units_by_capability(monkeypatch, capability, has_fp4):
    fake_gpus(monkeypatch, capability)
    diagnosis = run_json("doctor")
    (gpu,) = diagnosis["gpus"]
    assert (gpu["capability"], gpu["has_fp4_units"]) == (list(capability), has_fp4)
    assert parts(diagnosis)["the same on a GPU, with dequantised weights"][0] is True
    runs, reason = parts(diagnosis)[KERNELS]
    assert runs is True
    assert f"sm_{capability[0]}{capability[1]}" in reason
    reason = parts(diagnosis)["native FP4 units"][1]
    assert ("has them, but nothing in this release uses them" in reason) == has_fp4
    major, minor = capability
    text = " ".join(run("doctor").stdout.split())
    assert f"GPU-{major}{minor}, capability {major}.{minor}, 8.59 GB" in text


def test_doctor_says_when_torch_finds_no_gpu(monkeypatch):
    fake_gpus(monkeypatch)
    reason = parts(run_json("doctor"))["the same on a GPU, with dequantised weights"][1]
    assert "torch is built for CUDA 13.0, but finds no GPU; check the driver" in reason


@pytest.mark.parametrize("version", ["4.57.0", None])
def test_doctor_exits_with_1_if_the_basics_do_not_work(monkeypatch, version):
    real = metadata.version

    def fake(name: str) -> str:
        if name != "transformers":
            return real(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", fake)
    needs = ["torch>=2.9", "transformers<6,>=5", 'vllm>=0.26; extra == "vllm"']
    monkeypatch.setattr(metadata, "requires", lambda name: needs)
    diagnosis = run_json("doctor", code=1)
    runs, reason = parts(diagnosis)["transformers engine (nvfp4r.hf.load_model)"]
    assert runs is False
    assert f"transformers is {version or 'not installed'} (needs <6,>=5)" in reason
    assert diagnosis["basics_work"] is False


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["doctor"], 0, "What runs here"),
        (["inspect", "no/such/folder"], 2, "no such folder"),
        (["--help"], 0, "inspect"),
    ],
)
def test_the_module_runs_as_a_program(arguments, code, words):
    done = subprocess.run(
        [sys.executable, "-m", "nvfp4r.cli", *arguments], capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
