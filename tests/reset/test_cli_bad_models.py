"""Damaged and unsuitable models as a user meets them: one paragraph, exit code 2, nothing lost."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from nvfp4r.convert import quantise_checkpoint
from reset.cli import calibrate, generate
from tests.reset.toy_model import save_toy

RUNNER = CliRunner()
MODULE = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A bfloat16 model."""
    return save_toy(tmp_path_factory.mktemp("models") / "plain", torch.bfloat16)


@pytest.fixture(scope="module")
def nvfp4(plain):
    """The same as a W4A16 checkpoint."""
    quantise_checkpoint(plain, plain.parent / "nvfp4")
    return plain.parent / "nvfp4"


def refusal(app, *arguments: object) -> str:
    result = RUNNER.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())


def generate_refusal(folder) -> str:
    flags = ("--t-low", 0.3, "--tau0", 2, "--max-tokens", 5)
    return refusal(generate.app, "--model", folder, "--prompt", "a", *flags)


def cut_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2000])


def cut_header(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:40])


def edit_tensors(change):
    def edit(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def put_nan(tensors):
    tensors["lm_head.weight"][3, 4] = float("nan")


def forget_newlines(folder):
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_weights, r"model\.safetensors: cannot be read as a whole .* truncated or damaged"),
        (cut_header, r"model\.safetensors: cannot be read as a whole .* truncated or damaged"),
        (lambda f: (f / "config.json").unlink(), r"config\.json: no such file, but the folder"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json: cannot be read as JSON"),
        (edit_tensors(put_nan), "logits at output position 0 hold NaN.*nvfp4r inspect"),
        (forget_newlines, r"3 tokens spells the step delimiter .* no step would ever end"),
    ],
    ids=["cut", "cut header", "no config", "config", "nan logits", "no newline"],
)
def test_a_plain_model_that_cannot_be_used(plain, tmp_path, damage, message):
    folder = tmp_path / "model"
    shutil.copytree(plain, folder)
    damage(folder)
    assert re.search(message, generate_refusal(folder))


def edit_config(**changes):
    def edit(folder):
        (folder / "hf_quant_config.json").unlink()
        file = folder / "config.json"
        config = json.loads(file.read_text())
        config["quantization_config"].update(changes)
        file.write_text(json.dumps(config))

    return edit


def put_scale(value: float):
    return edit_tensors(lambda t: t.update({f"{MODULE}.weight_scale_2": torch.tensor(value)}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_weights, r"model\.safetensors: cannot be read as a whole"),
        (put_scale(0.0), f"{MODULE}.weight_scale_2 is 0.0, need a finite multiplier > 0"),
        (put_scale(-1.0), f"{MODULE}.weight_scale_2 is -1.0"),
        (put_scale(float("nan")), f"{MODULE}.weight_scale_2 is nan"),
        (put_scale(float("inf")), f"{MODULE}.weight_scale_2 is inf"),
        (
            edit_tensors(lambda t: t.pop(f"{MODULE}.weight_scale")),
            f"{MODULE}.weight_scale is missing, while {MODULE}.weight is there",
        ),
        (edit_config(ignore=[]), "lm_head.weight is BF16 .* calls this layer quantised"),
        (edit_config(ignore=["lm_head", "*.o_proj"]), "o_proj.weight_scale_2 stored, but the"),
        (edit_config(quant_algo="FP8"), "quant_algo is 'FP8'; supported are"),
    ],
    ids=["cut", "zero", "negative", "nan", "inf", "missing", "bf16", "excluded", "fp8"],
)
def test_a_checkpoint_that_cannot_be_used(nvfp4, tmp_path, damage, message):
    folder = tmp_path / "model"
    shutil.copytree(nvfp4, folder)
    damage(folder)
    assert re.search(message, generate_refusal(folder))


def test_modelopt_blocks_without_a_method_are_recognised(nvfp4, tmp_path):
    """Exports that name their producer alone; taken for a plain model they would be garbage."""
    folder = tmp_path / "model"
    shutil.copytree(nvfp4, folder)
    edit_config(producer={"name": "modelopt"}, quant_algo="INT4", quant_method=None)(folder)
    assert "quant_algo is 'INT4'; supported are" in generate_refusal(folder)


def test_a_full_disk_loses_no_threshold(plain, tmp_path, monkeypatch):
    data, file = tmp_path / "p.txt", tmp_path / "c.json"
    data.write_text("a\n")

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", fail)
    arguments = ["--model", plain, "--data", data, "--num-problems", 1, "--max-tokens", 5]
    result = RUNNER.invoke(calibrate.app, [*map(str, arguments), "--output", str(file)])
    assert result.exit_code == 2
    assert re.search(r"\d\.\d{4} nats", result.stdout)
    assert f"Error: {file}: cannot be written (No space left on device)" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.txt"]
