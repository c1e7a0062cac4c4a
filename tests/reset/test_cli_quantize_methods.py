"""`reset-quantize --method`: what each one writes, what it needs, and what is kept of a run that
was ended."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM
from typer.testing import CliRunner

from nvfp4r.checkpoint import load_checkpoint
from nvfp4r.hf import load_model
from nvfp4r.methods import METHODS
from reset.cli.quantize import app
from tests.reset.toy_model import save_toy, toy_tokenizer

RUNNER = CliRunner()
COMPRESSED = ("--format", "compressed-tensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A two-layer llama in bfloat16 with a byte-level tokenizer."""
    return save_toy(tmp_path_factory.mktemp("models") / "toy", torch.bfloat16)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Four texts of about 120 bytes, a token each."""
    random = torch.Generator().manual_seed(0)
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    letters = torch.randint(97, 123, (4, 120), generator=random)
    path.write_text("\n\n".join("".join(map(chr, row)) for row in letters.tolist()) + "\n")
    return path


TOKENS = 200  # of a sequence: more than any toy text has, fewer than all together


def run(*arguments: object, code: int = 0):
    """The toy texts are short: no shorter a sequence than all of them is asked for, unless told."""
    if "--calib-data" in arguments and "--calib-tokens" not in arguments:
        arguments = (*arguments, "--calib-tokens", TOKENS)
    result = RUNNER.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def refusal(*arguments: object) -> str:
    """The one paragraph on standard error; nothing on standard output."""
    result = run(*arguments, code=2)
    assert result.stdout == ""
    return " ".join(result.stderr.split())


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("activations", ["none", "nvfp4"])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "awq"])
def test_every_method_writes_a_checkpoint_that_runs(model, texts, tmp_path, method, activations):
    out = tmp_path / "out"
    arguments = ["--model", model, "--output", out, "--method", method, *COMPRESSED, "--json"]
    if activations == "nvfp4":
        arguments += ["--activations", "nvfp4"]
    if activations == "nvfp4" or METHODS[method].calibrated:
        arguments += ["--calib-data", texts]
    report = json.loads(run(*arguments).stdout)
    assert report["method"] == method
    checkpoint = load_checkpoint(out)
    assert (checkpoint.activations, len(checkpoint.modules)) == (activations, 14)
    assert checkpoint.rotation == METHODS[method].rotation
    assert bool(torch.isfinite(load_model(out)(torch.tensor([[1, 2, 3]])).logits).all())
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_gptq_reports_what_calibration_found(model, texts, tmp_path):
    arguments = ["--model", model, "--method", "gptq", "--calib-data", texts, "--damping", 0.05]
    result = run(*arguments, "--output", tmp_path / "json", "--calib-tokens", 50, "--json")
    calibration = json.loads(result.stdout)["calibration"]
    assert (calibration["samples"], calibration["tokens"]) == (4, 200)
    assert calibration["damping"] == 0.05
    inputs = {entry["modules"][0]: entry for entry in calibration["inputs"]}
    assert len(inputs) == 8
    assert inputs["model.layers.1.mlp.gate_proj"]["modules"] == [
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.up_proj",
    ]
    assert {entry["tokens"] for entry in inputs.values()} == {200}
    assert {entry["damping"] for entry in inputs.values()} == {0.05}
    result = run(*arguments, "--output", tmp_path / "text", "--calib-tokens", 20)
    assert "model.layers.*.mlp.down_proj x 2" in result.stdout  # 80 tokens for 128 inputs
    assert "singular, damped" in result.stdout
    assert re.search(r"method +gptq", result.stdout)


def test_texts_shorter_than_a_sequence_are_used_and_said(model, texts, tmp_path):
    arguments = ["--model", model, "--method", "gptq", "--calib-data", texts]
    result = run(*arguments, "--output", tmp_path / "out", "--json")
    tokens = json.loads(result.stdout)["calibration"]["tokens"]
    longest = max(len(toy_tokenizer()(text)["input_ids"]) for text in texts.read_text().split())
    error = " ".join(result.stderr.split())
    assert f"holds 4 texts; all are used the longest text of {texts} has {longest} tokens" in error
    assert f"fewer than {TOKENS}; what there is is used, {tokens} tokens in all" in error
    result = run(*arguments, "--output", tmp_path / "two", "--calib-tokens", 50)
    assert "the longest text" not in result.stderr


@pytest.mark.parametrize("method", ["gptq", "mr-gptq"])
def test_less_text_than_one_sequence_is_refused_before_anything_is_read(
    model, texts, tmp_path, method
):
    arguments = ["--model", model, "--method", method, "--calib-data", texts, *COMPRESSED]
    total = sum(len(toy_tokenizer()(text)["input_ids"]) for text in texts.read_text().split())
    told = refusal(*arguments, "--output", tmp_path / "out", "--calib-tokens", total + 1)
    assert f"--calib-data {texts}: its texts have {total} tokens together, less than one" in told
    assert f"of {total + 1}" in told
    assert f"a --calib-tokens of at most {total} to try it" in told
    assert not (tmp_path / "out").exists()
    run(*arguments, "--output", tmp_path / "out", "--calib-tokens", total)


def test_the_largest_inputs_are_measured_on_whatever_text_there_is(model, texts, tmp_path):
    arguments = ["--model", model, "--activations", "nvfp4", "--calib-data", texts]
    result = run(*arguments, "--output", tmp_path / "out", "--calib-tokens", 1024, *COMPRESSED)
    assert "what there is is used" in " ".join(result.stderr.split())


def test_a_command_that_was_ended_goes_on(model, texts, tmp_path, monkeypatch):
    """Ended in the second layer, by whatever; the next one writes the bytes of a whole run."""
    from nvfp4r.hf import sequential

    arguments = ["--model", model, "--method", "mr-gptq", "--calib-data", texts, *COMPRESSED]
    arguments += ["--activations", "nvfp4", "--calib-tokens", TOKENS]
    run(*arguments, "--output", tmp_path / "whole")
    factorise, calls = sequential.factorise, []

    def ended(hessian, damping):
        calls.append(hessian.name)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return factorise(hessian, damping)

    monkeypatch.setattr(sequential, "factorise", ended)
    RUNNER.invoke(app, [str(a) for a in (*arguments, "--output", tmp_path / "out")])
    monkeypatch.undo()
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "out.work"}
    error = refusal(*arguments, "--output", tmp_path / "out", "--damping", 0.1)
    assert "out.work: holds finished layers of a command with another --damping: 0.01" in error
    result = run(*arguments, "--output", tmp_path / "out")
    assert "going on with the finished layers in" in " ".join(result.stderr.split())
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "out"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "gptq"], "--method gptq runs the model over texts, whatever the activations"),
        (["--method", "awq"], "--method awq runs the model over texts, whatever the activations"),
        (["--method", "brq"], "which the modelopt format cannot say; use the other one (--format"),
        (["--method", "mr-gptq", "--calib-data", "x.txt"], "the modelopt format cannot say"),
        (
            ["--method", "four-over-six", "--calib-data", "x.txt"],
            "--method four-over-six uses no texts; add --activations nvfp4, choose one of gptq",
        ),
        (["--damping", 0.1], "--damping is for gptq and mr-gptq, but --method is rtn"),
        (
            ["--method", "gptq", "--calib-data", "x.txt", "--damping", 0],
            "--damping is 0.0, need a share within (0, 1]",
        ),
        (
            ["--method", "gptq", "--calib-data", "x.txt", "--headroom", 2],
            "--headroom is for quantised activations",
        ),
        (["--method", "gptq", "--calib-data", "no/such.txt"], "no/such.txt"),
    ],
)
def test_bad_flags_are_refused_before_any_work(model, tmp_path, arguments, message):
    assert message in refusal("--model", model, "--output", tmp_path / "out", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_texts_without_a_token_are_refused(model, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n\n \n")
    arguments = ["--model", model, "--method", "gptq", "--calib-data", empty]
    assert "empty.txt: holds no text" in refusal(*arguments, "--output", tmp_path / "out")


@pytest.mark.parametrize("method", ["gptq", "mr-gptq", "awq"])
def test_fused_experts_are_refused_before_texts_are_read(tmp_path, method):
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path / "moe")
    arguments = ["--model", tmp_path / "moe", "--output", tmp_path / "out", "--method", method]
    error = refusal(*arguments, *COMPRESSED, "--calib-data", "no/such.txt")
    assert "model.layers.0.block_sparse_moe.experts.0.w1" in error


def test_room_for_the_finished_layers_is_asked_for_too(model, texts, tmp_path, monkeypatch):
    arguments = ["--model", model, "--output", tmp_path / "out", "--calib-data", texts]
    needed = []
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    for flags in (["--activations", "nvfp4"], ["--method", "gptq"]):
        error = refusal(*arguments, *flags)
        needed.append(int(re.search(r"needs ([\d,]+) bytes", error)[1].replace(",", "")))
    layers = sum(n * k for n, k in ((64, 64), (32, 64), (32, 64), (64, 64)))
    layers = 2 * (layers + 3 * 64 * 128)  # weights of two layers
    assert needed[1] - needed[0] == layers * 9 // 16 + 14 * 4


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs VmHWM of Linux")
def test_peak_memory_is_not_that_of_the_parent():
    """A parent with 800 MB starts a process that needs half of it: its ru_maxrss begins there."""
    held = bytearray(800 << 20)
    code = "from reset.cli.quantize_report import peak_memory_bytes; print(peak_memory_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 50 << 20 < int(done.stdout) < len(held)
