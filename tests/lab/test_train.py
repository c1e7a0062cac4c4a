"""A training of seconds: the loss falls, the folder is one that the tools take, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from lab.pocket_reasoner import curve
from lab.pocket_reasoner.model import LARGEST_BYTES, Sizes, new_model, parameter_count, save_model
from lab.pocket_reasoner.search import SearchDifficulty
from lab.pocket_reasoner.train import train
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.lab.conftest import EASY, PLAN, SIZES


def points(folder):
    lines = (folder / "learning_curve.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_loss_falls(trained):
    folder, facts = trained
    losses = [point["loss"] for point in points(folder) if "loss" in point]
    assert losses[-1] < 0.4 * losses[0]
    assert facts["steps"] == 120
    assert facts["tokens"] == 120 * 8 * 128


def test_the_folder_is_a_model_like_any_other(trained):
    folder, facts = trained
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert parameter_count(model) == facts["parameters"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert not model.generation_config.do_sample
    names = {path.name for path in folder.iterdir()}
    assert {"README.md", "LICENSE", "learning_curve.png", "training.json"} <= names
    assert (folder / "model.safetensors").stat().st_size <= LARGEST_BYTES
    command = [sys.executable, "-m", "reset.cli.quantize", "--model", str(folder), "--json"]
    target = str(folder.parent / "nvfp4")
    done = subprocess.run([*command, "--output", target], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["quantised_modules"] == 14


def test_the_card_says_what_was_measured(trained):
    folder, facts = trained
    card = (folder / "README.md").read_text()
    for said in (
        f"{facts['parameters']:,} parameters",
        f"{facts['tokens']:,} tokens",
        "120 steps of 8 x 128 tokens",
        f"| chain | {100 * facts['calibration_accuracy']['chain']:.1f} % |",
        "license: apache-2.0",
    ):
        assert said in card
    assert json.loads((folder / "training.json").read_text()) == json.loads(json.dumps(facts))


def test_the_curve_can_be_drawn_again(trained, monkeypatch):
    folder, _ = trained
    before = (folder / curve.CURVE_FIGURE).read_bytes()
    monkeypatch.setattr(sys, "argv", ["curve", str(folder)])
    curve.main()
    assert (folder / curve.CURVE_FIGURE).read_bytes() == before


def test_the_same_seed_gives_the_same_weights(tmp_path):
    short = replace(PLAN, steps=3, problems=1, max_tokens=4)
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(replace(short, seed=seed), SIZES, EASY, tmp_path / name)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_the_clock_ends_a_training_that_would_go_on(tmp_path):
    plan = replace(PLAN, minutes=0.1, steps=None, problems=1, max_tokens=4)
    facts = train(plan, SIZES, EASY, tmp_path / "model")
    assert facts["steps"] > 5
    assert facts["seconds"] < 20
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minutes": 0}, "minutes is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"length": 2000}, "length is 2000"),
        ({"warmup": 0}, "warmup 0"),
        ({"processes": -1}, "processes -1"),
    ],
)
def test_refused_plans(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(PLAN, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 100}, "hidden is 100"),
        ({"intermediate": 0}, "intermediate is 0"),
        ({"heads": 3, "key_value_heads": 2}, "3 heads and 2"),
        ({"head_dim": 7}, "head_dim is 7"),
    ],
)
def test_refused_sizes(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SIZES, **changes)


def test_refused_outputs(tmp_path):
    with pytest.raises(ValueError, match="need a new folder"):
        train(PLAN, SIZES, EASY, tmp_path)
    with pytest.raises(ValueError, match="need a new folder"):
        train(PLAN, SIZES, EASY, tmp_path / "no" / "model")


def test_too_few_problems_are_told_before_anything_is_trained(tmp_path):
    few = replace(EASY, search=SearchDifficulty(numbers=(2, 2), largest=9))
    with pytest.raises(ValueError, match=r"only \d+ different chain problems"):
        train(replace(PLAN, problems=50), SIZES, few, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_model_too_large_for_the_repository_is_refused(tmp_path):
    large = new_model(replace(SIZES, hidden=512, intermediate=2048, layers=3), 0)
    with pytest.raises(ValueError, match="MiB of bfloat16 weights, more than the 16 MiB"):
        save_model(large, tmp_path / "model")


def test_the_default_sizes_are_what_the_study_needs():
    model = new_model(Sizes(), 0)
    assert 5e6 < parameter_count(model) < 8e6
    assert 2 * parameter_count(model) < LARGEST_BYTES
    config = model.config
    wide = (config.hidden_size, config.intermediate_size, 2 * config.head_dim)
    assert all(size % 128 == 0 for size in wide)
    layer = model.model.layers[0]
    deviations = [
        float(w.detach().std()) for w in (layer.mlp.up_proj.weight, layer.mlp.down_proj.weight)
    ]
    assert np.allclose(
        deviations, [0.02, 0.02 / 4], rtol=0.05
    )  # 8 layers add to the stream 16 times
