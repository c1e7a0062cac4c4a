"""`reset-quantize --activations nvfp4` for methods that only measure inputs: layer by layer, or the
whole model where that cannot be done, and what is left of a run that fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, MixtralConfig, MixtralForCausalLM
from typer.testing import CliRunner

from nvfp4r.checkpoint import load_checkpoint
from nvfp4r.hf import hidden_states
from nvfp4r.hf.layers import LayerwiseModel, NotLayerwiseError
from reset.cli import quantize_calibrated
from reset.cli.quantize import app
from reset.texts import read_texts
from tests.reset.toy_model import save_toy, toy_tokenizer

RUNNER = CliRunner()
WHOLE = "to measure its inputs, the whole model is loaded, "


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A two-layer llama in bfloat16 with a byte-level tokenizer."""
    return save_toy(tmp_path_factory.mktemp("models") / "toy", torch.bfloat16)


@pytest.fixture
def texts(tmp_path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("One and two make three.\n\nFour is even.\n\nFive is odd, as is seven.\n")
    return path


def run(model: Path, texts: Path, output: Path, *flags: object, code: int = 0):
    arguments = ["--model", model, "--output", output, "--activations", "nvfp4"]
    arguments += ["--format", "compressed-tensors", "--calib-data", texts, *flags]
    if "gptq" in flags:
        arguments += ["--calib-tokens", 30]  # the toy texts have few more in all
    result = RUNNER.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return " ".join(result.stderr.split())


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("method", ["rtn", "four-over-six", "brq"])
@pytest.mark.parametrize("head", [False, True])
def test_layer_by_layer_makes_the_bytes_that_the_whole_model_makes(
    model, texts, tmp_path, monkeypatch, method, head
):
    flags = ["--method", method, *(["--quantize-lm-head"] if head else [])]
    monkeypatch.setattr(quantize_calibrated, "load_source_model", None)  # not to be loaded
    assert WHOLE not in run(model, texts, tmp_path / "layers", *flags)
    monkeypatch.undo()

    def refuse(plan):
        raise NotLayerwiseError("as this test wants it")

    monkeypatch.setattr(quantize_calibrated.sequential, "check_architecture", refuse)
    error = run(model, texts, tmp_path / "whole", *flags)
    assert error.count(WHOLE) == error.count("as this test wants it") == 1
    assert files_of(tmp_path / "layers") == files_of(tmp_path / "whole")


def test_models_that_only_run_as_a_whole_do_and_it_is_said(texts, tmp_path):
    """Bloom's layers give attentions too, which shows when the first one runs."""
    tokenizer = toy_tokenizer()
    config = BloomConfig(vocab_size=len(tokenizer), hidden_size=64, n_layer=2, n_head=4)
    bloom = BloomForCausalLM(config)
    bloom.save_pretrained(tmp_path / "bloom")
    tokenizer.save_pretrained(tmp_path / "bloom")
    error = run(tmp_path / "bloom", texts, tmp_path / "out")
    size = sum(parameter.numel() for parameter in bloom.parameters()) * 4
    assert f"{WHOLE}{size / 1000:.0f} kB: BloomBlock gives more than its hidden states" in error
    checkpoint = load_checkpoint(tmp_path / "out")
    assert len(checkpoint.modules) == 8
    assert all(float(checkpoint.input_scale(name)) > 0 for name in checkpoint.modules)
    error = run(tmp_path / "bloom", texts, tmp_path / "gptq", "--method", "gptq", code=2)
    assert "use a method that needs no calibration" in error


@pytest.fixture
def experts(tmp_path) -> Path:
    tokenizer = toy_tokenizer()
    config = MixtralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path / "moe")
    tokenizer.save_pretrained(tmp_path / "moe")
    return tmp_path / "moe"


def test_experts_that_stay_mean_the_whole_model(experts, texts, tmp_path):
    error = run(experts, texts, tmp_path / "out", "--exclude", "*experts*")
    assert WHOLE in error
    assert "experts are stored one by one, but fused in transformers" in error
    assert len(load_checkpoint(tmp_path / "out").modules) == 4


def test_experts_whose_inputs_nothing_sees_are_refused_before_texts_are_read(experts, tmp_path):
    error = run(experts, tmp_path / "no-such.txt", tmp_path / "out", code=2)
    assert "experts, which are one fused parameter in MixtralForCausalLM" in error


def test_weights_that_transformers_would_make_up_are_refused(model, texts, tmp_path):
    shutil.copytree(model, tmp_path / "source")
    file = tmp_path / "source" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 3}))
    error = run(tmp_path / "source", texts, tmp_path / "out", code=2)
    assert "9 weights that LlamaForCausalLM needs are missing, model.layers.2." in error
    assert names(tmp_path) == {"source", "texts.txt"}


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_disk_without_room_for_hidden_states_is_refused_first(
    model, texts, tmp_path, monkeypatch, method
):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(hidden_states, "IN_MEMORY_BYTES", 0)
    error = run(model, texts, tmp_path / "out", "--method", method, code=2)
    tokenizer = toy_tokenizer()
    tokens = sum(len(tokenizer(text)["input_ids"]) for text in read_texts(str(texts), 128))
    assert f"{tmp_path}: the calibration texts' hidden states need " in error
    layers = " and finished layers " if method == "gptq" else ", but"
    assert f"need {tokens * 64 * 4:,} bytes{layers}" in error
    assert "1,000 bytes free; make room, take fewer or shorter texts (--calib-samples" in error
    assert names(tmp_path) == {"texts.txt"}


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("end", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_run_that_fails_in_the_second_layer_leaves_no_hidden_states(
    model, texts, tmp_path, monkeypatch, method, end
):
    """Whatever ends it; gptq's finished layer is kept, as ever, and the next run goes on."""
    monkeypatch.setattr(hidden_states, "IN_MEMORY_BYTES", 0)
    run_layer = LayerwiseModel.run_layer

    def ended(self, index, row, hidden):
        if index == 1:
            raise end
        return run_layer(self, index, row, hidden)

    monkeypatch.setattr(LayerwiseModel, "run_layer", ended)
    code = 2 if isinstance(end, OSError) else 130
    run(model, texts, tmp_path / "out", "--method", method, code=code)
    monkeypatch.setattr(LayerwiseModel, "run_layer", run_layer)
    kept = {"out.work"} if method == "gptq" else set()
    assert names(tmp_path) == {"texts.txt"} | kept
    run(model, texts, tmp_path / "out", "--method", method)
    assert names(tmp_path) == {"texts.txt", "out"}
