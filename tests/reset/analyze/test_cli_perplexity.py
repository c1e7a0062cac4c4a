"""reset-analyze perplexity over several models: one table, each figure that of the model alone."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from nvfp4r.convert import quantise_checkpoint
from nvfp4r.hf import load_model
from nvfp4r.selection import plan_conversion
from reset.analyze.perplexity import perplexity
from reset.cli.analyze import app
from tests.reset.toy_model import save_toy


def run(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, ["perplexity", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a W4A4 checkpoint by two methods, a W4A16 one, and a text."""
    path = tmp_path_factory.mktemp("perplexity")
    save_toy(path / "toy")
    names = plan_conversion(path / "toy").quantised
    amax = {name: torch.tensor(4.0) for name in names}
    for method in ("rtn", "brq"):
        quantise_checkpoint(
            path / "toy",
            path / method,
            method=method,
            dialect="compressed-tensors",
            activations="nvfp4",
            input_amax=amax,
        )
    quantise_checkpoint(path / "toy", path / "w4a16")
    for name in ("rtn", "brq", "w4a16"):
        for file in (path / "toy").glob("token*"):
            (path / name / file.name).write_bytes(file.read_bytes())
    (path / "text.txt").write_text("one two three, four five. " * 12)
    return path


def test_every_method_in_both_formats_beside_the_model(folder, tmp_path):
    models = [f for name in ("toy", "rtn", "brq") for f in ("--model", folder / name)]
    ways = ("--activations", "none", "--activations", "nvfp4")
    flags = (*models, *ways, "--data", folder / "text.txt", "--context", 48, "--stride", 40)
    output = tmp_path / "table.json"
    result = json.loads(run(*flags, "--json", "--output", output).stdout)
    assert result == json.loads(output.read_text())
    rows = result["models"]
    assert [(row["method"], row["format"]) for row in rows] == [
        (None, "float32"),
        ("rtn", "W4A16"),
        ("rtn", "W4A4"),
        ("brq", "W4A16"),
        ("brq", "W4A4"),
    ]
    assert len({row["perplexity"] for row in rows}) == 5
    first = rows[0]["perplexity"]
    for row in rows[1:]:
        assert row["change"] == pytest.approx(row["perplexity"] / first - 1)
        assert row["token_sha256"] == rows[0]["token_sha256"]

    from transformers import AutoTokenizer

    text = (folder / "text.txt").read_text()
    ids = AutoTokenizer.from_pretrained(folder / "toy")(text)["input_ids"]
    alone = load_model(folder / "brq", activations="nvfp4")
    wanted = perplexity(alone, ids, context=48, stride=40)
    assert rows[4]["perplexity"] == pytest.approx(wanted.perplexity, rel=1e-6)
    assert rows[4]["tokens"] == wanted.tokens


def test_a_table_says_what_it_was_measured_on(folder):
    flags = ("--model", folder / "toy", "--model", folder / "w4a16")
    shown = run(*flags, "--data", folder / "text.txt", "--context", 64).stdout
    assert "text.txt, context 64, stride 64" in shown
    assert "W4A16" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "toy", "--model", "toy"], "--model toy is given twice"),
        (["--model", "rtn", *["--activations", "none"] * 2], "--activations none is given twice"),
        (["--model", "toy", "--activations", "none"], "none of toy is an NVFP4 checkpoint"),
        (
            ["--model", "rtn", "--model", "w4a16", "--activations", "nvfp4"],
            "w4a16: its activations",
        ),
        (["--model", "toy", "--model", "absent"], "absent"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_model_is_loaded(
    folder, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("reset.engine.load_engine", lambda *_, **__: pytest.fail("was loaded"))
    output = tmp_path / "out.json"
    refused = run(*arguments, "--data", "text.txt", "--output", output, code=2)
    assert message in refused.stderr
    assert not output.exists()
