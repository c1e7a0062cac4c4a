"""reset-analyze as a user runs it, on a toy model, and on SmolLM2 for a few tokens."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from reset.cli.analyze import app
from tests.conftest import run_command
from tests.reset.analyze.records import dump_of, random_answers
from tests.reset.toy_model import save_toy

RUNNER = CliRunner()
PROBLEMS = "a b c\n\nwhat is this?\n\nthe third\n"


def run(*arguments: object, code: int = 0):
    result = RUNNER.invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("analyze")
    save_toy(path / "toy")
    (path / "p.txt").write_text(PROBLEMS)
    return path


@pytest.fixture(scope="module")
def dumps(folder):
    """A decoding in float32, and the same sequences scored in bfloat16."""
    common = ("--model", folder / "toy", "--max-tokens", 30)
    free = ("--data", folder / "p.txt", "--num-problems", 3, "--base-temp", 1.0)
    run("dump", *common, *free, "--output", folder / "free")
    run("dump", *common, "--forced", folder / "free", "--output", folder / "forced",
        "--dtype", "bfloat16")  # fmt: skip
    return folder / "free", folder / "forced"


def test_dump_goes_on_and_refuses_other_settings(folder, dumps):
    arguments = ("dump", "--model", folder / "toy", "--data", folder / "p.txt", "--num-problems", 3)
    arguments += ("--base-temp", 1.0, "--output", dumps[0])
    before = {path: path.stat().st_mtime_ns for path in dumps[0].iterdir()}
    run(*arguments, "--max-tokens", 30)
    assert {path: path.stat().st_mtime_ns for path in dumps[0].iterdir()} == before
    refused = run(*arguments, "--max-tokens", 31, code=2)
    assert "other settings (max_tokens)" in refused.stderr


def test_a_policy_can_decode(folder, tmp_path):
    flags = ("--t-low", 0.2, "--tau0", 1.5, "--seed", 3, "--batch-size", 2)
    run("dump", "--model", folder / "toy", "--data", folder / "p.txt", "--num-problems", 2,
        "--max-tokens", 5, "--output", tmp_path / "d", *flags)  # fmt: skip
    settings = json.loads((tmp_path / "d" / "dump.json").read_text())["settings"]
    assert (settings["policy"]["policy"], settings["policy"]["t_low"]) == ("reset", 0.2)
    assert (settings["seed"], settings["batch_size"], settings["top_p"]) == (3, 2, 0.95)


STUDIES = {
    "distribution": ("--dump", 0, "--dump", 1),
    "steps": ("--dump", 0, "--tau0", 0.7),
    "shift": ("--reference", 0, "--quantised", 1),
    "estimators": ("--dump", 0, "--window", 8),
}


@pytest.mark.parametrize("study", STUDIES)
def test_studies_print_and_write(dumps, tmp_path, study):
    values = iter(STUDIES[study])
    flags = []
    for flag, value in zip(values, values, strict=True):
        is_dump = flag in ("--dump", "--reference", "--quantised")
        flags += [flag, dumps[value] if is_dump else value]
    printed = run(study, *flags, "--output", tmp_path / study)
    assert "nats" in printed.stdout
    kinds = {path.suffix for path in tmp_path.iterdir()}
    assert kinds == {".png", ".svg", ".json", ".csv"}
    as_json = run(study, *flags, "--json").stdout
    assert as_json == (tmp_path / f"{study}.json").read_text()


def test_perplexity(folder, tmp_path):
    text = folder / "text.txt"
    text.write_text("one two three. " * 20)
    output = tmp_path / "ppl.json"
    flags = ("--model", folder / "toy", "--data", text, "--context", 64, "--max-tokens", 100)
    result = json.loads(run("perplexity", *flags, "--json", "--output", output).stdout)
    assert result == json.loads(output.read_text())
    assert (result["protocol"]["context"], result["protocol"]["stride"]) == (64, 64)
    (row,) = result["models"]
    assert (row["text_tokens"], row["windows"], row["tokens"]) == (100, 2, 98)
    assert (row["format"], row["method"], row["change"]) == ("float32", None, None)
    assert row["perplexity"] > 1
    assert "perplexity" in run("perplexity", *flags, "--stride", 32).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dump"], "give either --data (problems to decode) or --forced"),
        (["dump", "--data", "p.txt", "--forced", "d"], "give either --data"),
        (["dump", "--forced", "d", "--t-low", "0.1", "--seed", "1"], "--t-low, --seed: nothing is"),
        (["dump", "--data", "p.txt", "--max-tokens", "0"], "--max-tokens is 0"),
        (["dump", "--data", "p.txt", "--num-problems", "0"], "--num-problems is 0"),
        (["dump", "--data", "p.txt", "--num-problems", "9"], "holds 3 problems, but 9"),
        (
            ["dump", "--data", "p.txt", "--num-problems", "1", "--batch-size", "0"],
            "batch_size is 0",
        ),
        (
            ["dump", "--data", "p.txt", "--num-problems", "1", "--policy", "reset"],
            "t_low is missing",
        ),
        (["dump", "--data", "p.txt", "--device", "tpu"], "--device is 'tpu'"),
        (["dump", "--forced", "toy"], "is a folder, but no dump"),
        (["dump", "--forced", "none.txt"], "none.txt"),
        (["perplexity", "--data", "none.txt"], "none.txt"),
        (["perplexity", "--data", "empty.txt"], "holds no text"),
        (["perplexity", "--data", "latin.txt"], "is not UTF-8"),
        (["perplexity", "--data", "p.txt", "--stride", "4096"], "stride 4096"),
        (["perplexity", "--data", "p.txt", "--context", "2000"], "made for 1024"),
        (["perplexity", "--data", "p.txt", "--max-tokens", "1"], "--max-tokens is 1"),
    ],
)
def test_bad_input(folder, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    (folder / "empty.txt").write_text("\n")
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    command, *rest = arguments
    if "2000" in rest:
        (folder / "long.txt").write_text("a" * 1500)
        rest = ["--data", "long.txt", *rest[2:]]
    target = tmp_path / ("out.json" if command == "perplexity" else "out")
    result = run(command, "--model", "toy", "--output", target, *rest, code=2)
    assert message in result.stderr
    assert not target.exists()


@pytest.mark.parametrize("study", STUDIES)
def test_targets_and_folders_are_checked_first(tmp_path, study):
    dump_of(tmp_path / "d", random_answers(1, [9]))
    good, bad = tmp_path / "d", tmp_path / "none"
    names = ("--reference", "--quantised") if study == "shift" else ("--dump",)
    flags = [value for name in names for value in (name, good)]
    refused = run(study, *flags, "--output", tmp_path / "no" / "x", code=2)
    assert "does not exist; create it first" in refused.stderr
    flags = [value for name in names for value in (name, bad)]
    assert "none: has no dump.json" in run(study, *flags, code=2).stderr


def test_an_incomplete_dump_is_said_to_be_one(tmp_path):
    dump_of(tmp_path / "d", random_answers(1, [9, 9]))
    (tmp_path / "d" / "00000.safetensors").unlink()
    assert "1 of 2 answers, not yet complete" in run("steps", "--dump", tmp_path / "d").stderr


@pytest.mark.model
def test_bf16_and_nvfp4_of_a_real_model(smollm2, smollm2_nvfp4, tmp_path):
    """Quantisation moves the entropies of the same tokens; scoring them again does not."""
    data = tmp_path / "p.txt"
    data.write_text("What is 7 times 8?\n\nName three colours.\n")
    command = ("reset.cli.analyze", "dump", "--max-tokens", 24)
    run_command(*command, "--model", smollm2, "--data", data, "--num-problems", 2,
                "--output", tmp_path / "bf16")  # fmt: skip
    for name, model in (("again", smollm2), ("nvfp4", smollm2_nvfp4["modelopt"])):
        forced = ("--forced", tmp_path / "bf16", "--output", tmp_path / name)
        run_command(*command, "--model", model, *forced)
    shift = ("shift", "--json", "--reference", tmp_path / "bf16", "--quantised")
    same = json.loads(run(*shift, tmp_path / "again").stdout)
    moved = json.loads(run(*shift, tmp_path / "nvfp4").stdout)
    assert same["summary"]["shift_mean_abs_nats"] == 0
    assert moved["summary"]["shift_mean_abs_nats"] > 0.01
    assert moved["summary"]["tokens"] == same["summary"]["tokens"] >= 4
    assert "NVFP4" in moved["sources"][1]["quantisation"]["format"]


@pytest.mark.model
def test_perplexity_of_a_real_model_is_what_transformers_says(smollm2, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(
        "The river rises in the mountains and flows through three valleys before it reaches the "
        "sea. In spring it carries the melt water of the snow, and the fields beside it are often "
        "under water for some days."
    )
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).eval()
    ids = AutoTokenizer.from_pretrained(smollm2)(text.read_text(), return_tensors="pt").input_ids
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    result = json.loads(run("perplexity", "--model", smollm2, "--data", text, "--json").stdout)
    (found,) = result["models"]
    assert found["tokens"] == ids.shape[1] - 1
    # The logits are the same; both means are float32 or better.
    assert found["mean_nll_nats"] == pytest.approx(loss, rel=1e-5)
