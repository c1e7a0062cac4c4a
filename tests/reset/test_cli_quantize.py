"""`reset-quantize` as a user meets it: flags, report, exit codes, refusals before any work."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from nvfp4r.checkpoint import load_checkpoint
from nvfp4r.hf import load_model
from reset.cli import source_model
from reset.cli.quantize import app
from reset.cli.source_model import token_rows
from reset.texts import read_texts
from tests.reset.toy_model import save_toy, toy_tokenizer

RUNNER = CliRunner()
TEXTS = "One and two make three.\nSo they do.\n\n\nFour is even.\n \nFive is odd.\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A two-layer llama in bfloat16 with a byte-level tokenizer; q, k, v of 64 inputs."""
    return save_toy(tmp_path_factory.mktemp("models") / "toy", torch.bfloat16)


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text(TEXTS)
    return path


def run(*arguments: object, code: int = 0):
    result = RUNNER.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def refusal(*arguments: object) -> str:
    """The one paragraph on standard error; nothing on standard output."""
    result = run(*arguments, code=2)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def words(text: str) -> str:
    return " ".join(text.split())


def test_weights_only(model, tmp_path):
    out = tmp_path / "out"
    text = words(run("--model", model, "--output", out).stdout)
    assert "model.layers.*.self_attn.{q_proj,k_proj,v_proj} x 2" in text
    assert "model.layers.*.mlp.{gate_proj,up_proj} x 2" in text
    assert "output head: lm_head" in text
    assert "embedding: model.embed_tokens" in text
    for name in ("size", "bits 4.5", "peak memory", "time"):
        assert name in text
    checkpoint = load_checkpoint(out)
    assert (checkpoint.dialect, checkpoint.activations) == ("modelopt", "none")
    assert len(checkpoint.modules) == 14
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert (out / "generation_config.json").exists()


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_weights_and_activations(model, texts, tmp_path, dialect):
    out = tmp_path / "out"
    arguments = ["--model", model, "--output", out, "--format", dialect]
    result = run(*arguments, "--activations", "nvfp4", "--calib-data", texts, "--json")
    assert f"{texts} holds 3 texts; all are used" in words(result.stderr)
    report = json.loads(result.stdout)
    tokenizer = toy_tokenizer()
    tokens = sum(len(tokenizer(text)["input_ids"]) for text in read_texts(str(texts), 128))
    assert report["calibration"] == {"data": str(texts), "samples": 3, "tokens": tokens}
    assert report["quantised_modules"] == 14
    assert report["output_bytes"] < report["source_bytes"]
    assert report["peak_memory_bytes"] > report["source_bytes"]
    checkpoint = load_checkpoint(out)
    assert (checkpoint.dialect, checkpoint.activations) == (dialect, "nvfp4")

    # The scale of the first layer is the largest normalised input over all texts.
    reference = source_model.load_source_model(model, torch.device("cpu"))
    norm = reference.model.layers[0].input_layernorm
    amax = 0.0
    for text in read_texts(str(texts), 128):
        ids = torch.tensor(tokenizer(text)["input_ids"])
        with torch.inference_mode():
            amax = max(amax, float(norm(reference.model.embed_tokens(ids)).abs().max()))
    for name in ("q_proj", "k_proj", "v_proj"):
        scale = checkpoint.input_scale(f"model.layers.0.self_attn.{name}")
        assert float(scale) == pytest.approx(amax / 2688, rel=1e-6)

    logits = load_model(out)(torch.tensor([[1, 2, 3]])).logits
    assert bool(torch.isfinite(logits).all())


def test_headroom_multiplies_the_input_scales(model, texts, tmp_path):
    scales = []
    for name, headroom in (("one", 1), ("two", 2)):
        out = tmp_path / name
        arguments = ["--activations", "nvfp4", "--calib-data", texts, "--headroom", headroom]
        run("--model", model, "--output", out, *arguments)
        scales.append(float(load_checkpoint(out).input_scale("model.layers.1.mlp.down_proj")))
    assert scales[1] == pytest.approx(2 * scales[0], rel=1e-6)


def test_fewer_samples_and_tokens_are_used_when_asked(model, texts, tmp_path):
    arguments = ["--activations", "nvfp4", "--calib-data", texts, "--calib-samples", 2]
    result = run(
        "--model", model, "--output", tmp_path / "out", *arguments, "--calib-tokens", 4, "--json"
    )
    calibration = json.loads(result.stdout)["calibration"]
    assert (calibration["samples"], calibration["tokens"]) == (2, 8)
    assert "all are used" not in result.stderr


def test_layers_can_be_excluded(model, tmp_path):
    out = tmp_path / "out"
    arguments = ["--exclude", "*.down_proj", "--exclude", "model.layers.0.self_attn.qkv_proj"]
    text = words(run("--model", model, "--output", out, *arguments).stdout)
    assert "excluded: " in text
    assert len(load_checkpoint(out).modules) == 14 - 2 - 3


def test_force_replaces_an_old_output(model, tmp_path):
    out = tmp_path / "out"
    run("--model", model, "--output", out)
    assert "exists already" in refusal("--model", model, "--output", out)
    run("--model", model, "--output", out, "--force", "--format", "compressed-tensors")
    assert load_checkpoint(out).dialect == "compressed-tensors"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--activations", "nvfp4"], "--activations nvfp4 needs input scales"),
        (["--calib-data", "x.txt"], "--calib-data is for quantised activations"),
        (["--headroom", "2"], "--headroom is for quantised activations"),
        (
            ["--activations", "nvfp4", "--calib-data", "x.txt", "--headroom", "0.5"],
            "--headroom is 0.5, need a finite factor >= 1",
        ),
        (["--method", "gtpq"], "method is 'gtpq', need one of rtn, four-over-six, brq, gptq"),
        (["--device", "tpu"], "--device is 'tpu', need cpu, cuda or cuda:N"),
        (["--exclude", "*.dwon_proj"], "exclusion pattern '*.dwon_proj' covers none"),
        (["--exclude", "*.q_proj"], "covers model.layers.0.self_attn.q_proj but not"),
        (["--activations", "nvfp4", "--calib-data", "no/such.txt"], "no/such.txt"),
    ],
)
def test_bad_flags_are_refused_before_any_work(model, tmp_path, arguments, message):
    error = refusal("--model", model, "--output", tmp_path / "out", *arguments)
    assert message in words(error)
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_is_not_there_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = refusal("--model", model, "--output", tmp_path / "out", "--device", "cuda:1")
    assert "--device is cuda:1, but torch finds 0 CUDA GPUs" in error


def edit_tensors(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """A change of a model folder that changes its tensors."""

    def edit(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def put(value: float):
    return edit_tensors(lambda t: t["model.layers.1.mlp.up_proj.weight"][3, 4].fill_(value))


def make_odd(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(128, 40, dtype=torch.bfloat16)


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2000])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (put(float("nan")), "model.layers.1.mlp.up_proj.weight holds 1 NaN or infinite values"),
        (put(float("inf")), "model.layers.1.mlp.up_proj.weight holds 1 NaN or infinite values"),
        (edit_tensors(make_odd), "model.layers.1.mlp.up_proj: K=40, need a multiple of 16"),
        (cut, "model.safetensors: cannot be read as a whole safetensors file"),
    ],
    ids=["nan", "inf", "odd", "cut"],
)
def test_bad_weights_leave_nothing_behind(model, texts, tmp_path, damage, message):
    source = tmp_path / "source"
    shutil.copytree(model, source)
    damage(source)
    arguments = ["--activations", "nvfp4", "--calib-data", texts, "--json"]
    error = refusal("--model", source, "--output", tmp_path / "out", *arguments)
    assert message in words(error)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "texts.txt"}


def test_a_disk_that_is_too_small_is_refused_first(model, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    error = refusal("--model", model, "--output", tmp_path / "out")
    assert "1,000 bytes free" in words(error)


def test_a_missing_tokenizer_is_refused_before_any_work(model, texts, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(model, source, ignore=shutil.ignore_patterns("tokenizer*"))
    arguments = ["--activations", "nvfp4", "--calib-data", texts]
    error = refusal("--model", source, "--output", tmp_path / "out", *arguments)
    assert f"{source}: no tokenizer could be loaded" in words(error)


def test_transposed_layers_are_refused(tmp_path):
    """GPT-2 keeps its linear weights as [K, N]; quantising those along K would ruin them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    error = refusal("--model", tmp_path / "gpt2", "--output", tmp_path / "out")
    assert "transformer.h.0.attn.c_attn: is a Conv1D in GPT2LMHeadModel" in words(error)


def test_an_unknown_architecture_is_noted(model, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(model, source)
    config = json.loads((source / "config.json").read_text()) | {"model_type": "newmodel"}
    (source / "config.json").write_text(json.dumps(config))
    result = run("--model", source, "--output", tmp_path / "out")
    assert "does not know model_type 'newmodel'" in words(result.stderr)
    assert len(load_checkpoint(tmp_path / "out").modules) == 14


def test_debug_keeps_the_traceback(model, tmp_path):
    result = RUNNER.invoke(
        app, ["--model", str(model), "--output", str(tmp_path / "o"), "--method", "x", "--debug"]
    )
    assert isinstance(result.exception, ValueError)


def test_token_rows_are_cut_and_empty_texts_left_out():
    tokenizer = toy_tokenizer()
    rows = token_rows(["abcdef", "", "ab"], tokenizer, 4)
    assert [row.tolist() for row in rows] == [
        tokenizer("abcdef")["input_ids"][:4],
        tokenizer("ab")["input_ids"],
    ]
    with pytest.raises(ValueError, match="give no token"):
        token_rows([""], tokenizer, 4)
    with pytest.raises(ValueError, match="--calib-tokens is 0"):
        token_rows(["a"], tokenizer, 0)


def test_the_module_runs_as_a_program(model, tmp_path):
    command = [sys.executable, "-m", "reset.cli.quantize", "--model", str(model)]
    command += ["--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "bits" in done.stdout
    assert "quantising" in done.stderr
    assert "bits" not in done.stderr
    refused = subprocess.run([*command, "--method", "gtpq"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.startswith("Error: method is 'gtpq'")
