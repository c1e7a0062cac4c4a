"""reset-generate and reset-calibrate as a user runs them, on a toy model."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from reset.cli import calibrate, generate
from reset.trace.record import Trace
from tests.reset.toy_model import save_toy

RUNNER = CliRunner()
POLICY = ["--t-low", "0.3", "--tau0", "2.0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_toy(tmp_path_factory.mktemp("toy")))


def run(app, *arguments: str, code: int = 0):
    result = RUNNER.invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result


def test_text_table_page_and_picture(folder, tmp_path):
    page, picture = tmp_path / "t.html", tmp_path / "t.png"
    result = run(
        generate.app,
        *("--model", folder, "--prompt", "a b c", "--seed", "4", "--max-tokens", "20"),
        *POLICY,
        *("--trace", str(page), "--figure", str(picture)),
    )
    for word in ("share at T_high", "mean entropy", "tokens/s", "nats"):
        assert word in result.stdout
    assert "trace page:" in result.stderr
    assert "tau_0 2.0 nats" in result.stderr
    assert "</html>" in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_is_the_whole_trace_and_nothing_else(folder):
    arguments = ["--model", folder, "--prompt", "a", "--seed", "4", "--max-tokens", "15", "--json"]
    trace = Trace.from_json(run(generate.app, *arguments, *POLICY).stdout)
    assert 1 <= len(trace.tokens) <= 15
    assert trace.policy["tau_0"] == 2.0
    assert Trace.from_json(run(generate.app, *arguments, *POLICY).stdout).tokens == trace.tokens


def test_the_baseline_needs_no_threshold(folder):
    arguments = ["--model", folder, "--prompt", "a", "--max-tokens", "5", "--json"]
    fixed = ["--policy", "fixed", "--base-temp", "0.6"]
    trace = Trace.from_json(run(generate.app, *arguments, *fixed).stdout)
    assert {round(token.temperature, 6) for token in trace.tokens} == {0.6}


def test_prompt_from_standard_input(folder):
    arguments = ["--model", folder, "--prompt", "-", "--max-tokens", "3", "--json", *POLICY]
    result = RUNNER.invoke(generate.app, arguments, input="from a pipe")
    assert Trace.from_json(result.stdout).prompt == "from a pipe"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--t-low", "0.3"], "tau_0 is missing"),
        (["--t-low", "0.3"], "reset-calibrate"),
        (["--t-low", "2", "--tau0", "1"], "t_low must not exceed"),
        (["--t-low", "nan", "--tau0", "1"], "t_low is nan"),
        ([*POLICY, "--window", "0"], "window is 0"),
        ([*POLICY, "--policy", "magic"], "policy is 'magic'"),
        ([*POLICY, "--top-p", "1.5"], "top_p is 1.5"),
        ([*POLICY, "--max-tokens", "0"], "max_new_tokens is 0"),
        ([*POLICY, "--seed", "-1"], "seed is -1; it must be between 0 and"),
        ([*POLICY, "--device", "tpu"], "--device is 'tpu', need cpu, cuda or cuda:N"),
        (["--t-low", "-0.1", "--tau0", "1"], "t_low is -0.1"),
        (["--t-low", "0.1", "--tau0", "nan"], "tau_0 is nan"),
        ([*POLICY, "--engine", "vllm"], "needs vLLM, which is not installed: pip install"),
        ([*POLICY, "--engine", "onnx"], "--engine is 'onnx'"),
        (
            [*POLICY, "--trace", "/no/such/folder/t.html"],
            "folder /no/such/folder does not exist; create it first",
        ),
        (["--preset", "Qwen3-4B"], "no preset is named 'Qwen3-4B'"),
        ([*POLICY, "--activations", "nvfp4"], "not an NVFP4 checkpoint"),
    ],
)
def test_bad_flags_are_one_sentence_and_exit_code_2(folder, arguments, message):
    result = run(generate.app, "--model", folder, "--prompt", "a", *arguments, code=2)
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_calibrate_then_generate_with_the_file(folder, tmp_path):
    data, file = tmp_path / "p.jsonl", tmp_path / "c.json"
    data.write_text('{"question": "a"}\n{"question": "b c"}\n{"question": "d"}\n')
    result = run(
        calibrate.app,
        *("--model", folder, "--data", str(data), "--num-problems", "3", "--max-tokens", "20"),
        *("--batch-size", "2", "--t-low", "0.3", "--output", str(file)),
    )
    assert "nats" in result.stdout
    written = json.loads(file.read_text())
    assert written["config"]["t_low"] == 0.3
    assert len(written["tokens"]) == len(written["problems"]) == 3
    arguments = ["--model", folder, "--prompt", "a", "--max-tokens", "5", "--json"]
    trace = Trace.from_json(run(generate.app, *arguments, "--preset", str(file)).stdout)
    assert trace.policy["tau_0"] == written["config"]["tau_0"]


def test_r4_calibration_measures_raw_entropies_whatever_the_sampling(folder, tmp_path):
    """A threshold from tempered scores would shrink with the sampling temperature."""
    from reset.calibrate import percentile_threshold
    from reset.config import ReSETConfig
    from reset.engine import generate as decode
    from reset.engine import load_engine, make_prompt

    data, file = tmp_path / "p.jsonl", tmp_path / "c.json"
    data.write_text('{"question": "a b"}\n')
    arguments = ["--model", folder, "--data", str(data), "--num-problems", "1", "--top-p", "0.3"]
    run(calibrate.app, *arguments, "--max-tokens", "30", "--output", str(file))
    engine = load_engine(folder)
    trace = decode(
        engine,
        [make_prompt(engine, "a b")],
        ReSETConfig(policy="fixed", base_temp=0.6),
        max_new_tokens=30,
        top_p=0.3,
        seed=0,
    )[0]
    expected = percentile_threshold([[token.entropy_nats for token in trace.tokens]])
    assert json.loads(file.read_text())["config"]["tau_0"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--percentile", "120"], "percentile is 120"),
        (["--t-low", "3"], "t_low must not exceed"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--num-problems", "9"], "holds 1 problems, but 9"),
        (["--output", "/no/such/folder/c.json"], "/no/such/folder does not exist; create it first"),
    ],
)
def test_calibrate_checks_before_it_decodes(folder, tmp_path, arguments, message):
    data = tmp_path / "p.jsonl"
    data.write_text('{"question": "a"}\n')
    base = ["--model", folder, "--data", str(data), "--num-problems", "1"]
    output = ["--output", str(tmp_path / "c.json")]
    result = run(calibrate.app, *base, *output, *arguments, code=2)
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "c.json").exists()


@pytest.mark.parametrize("module", ["reset.cli.generate", "reset.cli.calibrate"])
def test_help_in_a_real_process(module):
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--t-low" in done.stdout
