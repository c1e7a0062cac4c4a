"""reset-run as a user runs it, against a scripted server and with a toy model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
import typer
from typer.testing import CliRunner

from reset.calibrate import text_sha256
from reset.cli import run as run_command
from reset.evaluate.graders.hidden_tests import encode_hidden
from reset.evaluate.store import SAMPLES, SCORES, read_samples
from tests.reset.evaluate.server import Script, chat_reply, serving
from tests.reset.toy_model import save_toy

RUNNER = CliRunner()
POLICY = ("--t-low", "0.3", "--tau0", "0.6")
FLAGS = (
    *("--model", "--task", "--data", "--t-low", "--tau0", "--t-high", "--window", "--policy"),
    *("--baseline", "--base-temp", "--backend", "--engine", "--n-samples", "--max-tokens"),
    *("--top-p", "--min-p", "--seed", "--tp", "--max-problems", "--output", "--resume"),
)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"id": f"q{n}", "problem": f"What is {n} + 1?", "answer": n + 1} for n in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def adds(_, body):
    """Adds rightly, but for three seeds in ten."""
    number = int(body["messages"][-1]["content"].split("What is ")[1].split(" ")[0])
    value = number + 1 + (body["seed"] % 10 < 3)
    return chat_reply(f"Adding one gives \\boxed{{{value}}}.", tokens=9)


def run(*arguments, code=0):
    result = RUNNER.invoke(run_command.app, [str(one) for one in arguments])
    assert result.exit_code == code, result.output
    return result


def flags(data, script, output):
    return (
        *("--task", "jsonl", "--data", data, "--model", "toy", "--engine", script.url),
        *("--n-samples", "3", "--output", output, "--retries", "0"),
    )


def message_of(result):
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())


def test_a_run_without_a_command_name_then_report_and_compare(data, tmp_path):
    with serving(Script(adds)) as script:
        base = run(*flags(data, script, tmp_path / "base"), "--baseline")
        run("score", *flags(data, script, tmp_path / "reset"), *POLICY)
    for word in ("95 % interval", "each seed", "truncated", "unparsed", "tokens/s", "8 x 3"):
        assert word in base.stdout
    assert run("report", tmp_path / "base").stdout == base.stdout
    compared = run("compare", tmp_path / "base", tmp_path / "reset", "--output", tmp_path / "out")
    assert "no difference shown" in compared.stdout
    assert "8 problems are few" in message_of(compared)
    assert (tmp_path / "out" / "comparison.svg").exists()
    numbers = json.loads(run("compare", tmp_path / "base", tmp_path / "reset", "--json").stdout)
    (difference,) = numbers["lines"][1]["differs_in"]
    assert difference.startswith("policy fixed: T 0.6 -> reset:")


def test_json_holds_settings_scores_and_speed(data, tmp_path):
    with serving(Script(adds)) as script:
        result = run(*flags(data, script, tmp_path / "r"), "--baseline", "--seed", "5", "--json")
    found = json.loads(result.stdout)
    assert found["settings"]["seeds"] == [5, 6, 7]
    assert found["settings"]["engine"]["model"] == "toy"
    assert found["settings"]["grading"]["math-verify"]
    assert found["scores"]["samples"] == 24
    assert found["speed"]["tokens"] == 24 * 9


def test_a_recipe_runs_every_arm_and_compares(data, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("arms: {cold: {policy: fixed, base_temp: 0.1}, reset: {}, low: {t_low: 0.1}}")
    arguments = ("--recipe", recipe, *POLICY)
    with serving(Script(adds)) as script:
        result = run(*flags(data, script, tmp_path / "sweep"), *arguments)
        asked = len(script.bodies)
        again = run(*flags(data, script, tmp_path / "sweep"), *arguments, "--resume")
        assert len(script.bodies) == asked == 72
    assert again.stdout == result.stdout
    assert "97.5 % interval" in result.stdout
    entries = {path.name for path in (tmp_path / "sweep").iterdir()}
    names = {f"comparison.{ending}" for ending in ("json", "png", "svg")}
    assert entries == names | {"cold", "reset", "low"}


def test_an_endpoint_that_breaks_keeps_what_came_and_resume_ends_as_if_it_had_not(data, tmp_path):
    with serving(Script(adds)) as script:
        run(*flags(data, script, tmp_path / "whole"), "--baseline")
    broken = Script(lambda n, body: adds(n, body) if n < 10 else (500, "out of memory"))
    with serving(broken) as script:
        result = run(*flags(data, script, tmp_path / "r"), "--baseline", code=2)
    assert "HTTP 500: out of memory" in message_of(result)
    assert "--resume" in message_of(result)
    assert len(read_samples(tmp_path / "r")) >= 9
    with serving(Script(adds)) as script:
        run(*flags(data, script, tmp_path / "r"), "--baseline", "--resume")
    same = [(tmp_path / name / SCORES).read_bytes() for name in ("whole", "r")]
    assert same[0] == same[1]


def test_a_killed_process_goes_on(data, tmp_path):
    with serving(Script(adds)) as script:
        run(*flags(data, script, tmp_path / "whole"), "--baseline")
    with serving(Script(adds, delay_s=0.05)) as script:
        arguments = [*flags(data, script, tmp_path / "r"), "--baseline", "--concurrency", "1"]
        command = [sys.executable, "-m", "reset.cli.run", *map(str, arguments)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        file = tmp_path / "r" / SAMPLES
        until = time.monotonic() + 60
        while not (file.exists() and file.stat().st_size) and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert 0 < len(read_samples(tmp_path / "r")) < 24
        done = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    same = [(tmp_path / name / SCORES).read_bytes() for name in ("whole", "r")]
    assert same[0] == same[1]


def test_h10_a_model_that_answers_nothing_is_refused(data, tmp_path):
    with serving(Script(lambda *_: chat_reply(""))) as script:
        result = run(*flags(data, script, tmp_path / "r"), "--baseline", code=2)
    assert "no score: 20 of 20 answers are degenerate (20 of them blank" in message_of(result)
    assert not (tmp_path / "r" / SCORES).exists()


def test_problems_of_the_calibration_are_refused(data, tmp_path):
    preset = tmp_path / "c.json"
    used = [text_sha256("What is 3 + 1?"), "0" * 64]
    preset.write_text(json.dumps({"config": {"t_low": 0.3, "tau_0": 0.6}, "problems": used}))
    with serving(Script(adds)) as script:
        result = run(*flags(data, script, tmp_path / "r"), "--preset", preset, code=2)
        assert not script.bodies
    assert "was calibrated on 1 problems of this task (q3, ...)" in message_of(result)


def test_r2_code_is_run_against_public_and_hidden_tests(tmp_path):
    """The second answer of each problem passes the public test and fails the hidden one."""
    case = {"input": "2\n3", "output": "5", "testtype": "stdin"}
    row = {
        "id": "sum",
        "kind": "code",
        "question": "Print the sum of two lines.",
        "public_test_cases": [case],
        "private_test_cases": encode_hidden(json.dumps([{**case, "input": "1\n1", "output": "2"}])),
    }
    path = tmp_path / "code.jsonl"
    path.write_text(json.dumps(row) + "\n")
    programs = ("print(int(input()) + int(input()))", "print(5)")

    def reply(number, _):
        return chat_reply(f"```python\n{programs[number]}\n```")

    with serving(Script(reply)) as script:
        arguments = (*flags(path, script, tmp_path / "r"), "--n-samples", "2")
        run(*arguments, "--baseline", "--concurrency", "1")
        assert "standard input" in script.bodies[0]["messages"][0]["content"]
    assert [sample["correct"] for sample in read_samples(tmp_path / "r")] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "t_low is missing"),
        (("--baseline", "--policy", "uniform"), "--baseline and --policy uniform exclude"),
        (("--baseline", "--engine", "onnx"), "--engine is 'onnx'; need hf, vllm, or an address"),
        (("--baseline", "--tp", "2"), "--tp is 2"),
        (("--baseline", "--backend", "nvfp4r"), "a server chooses its own kernels"),
        (("--baseline", "--activations", "none"), "--activations is for --engine hf"),
        (("--baseline", "--task", "aime26"), "task is 'aime26'"),
        (("--baseline", "--n-samples", "0"), "n_samples is 0"),
        (("--baseline", "--output", "/no/such/folder"), "/no/such does not exist; create it"),
        (("--baseline", "--concurrency", "0"), "concurrency is 0"),
    ],
)
def test_bad_flags_are_one_sentence_before_anything_is_asked(data, tmp_path, arguments, message):
    with serving(Script(adds)) as script:
        result = run(*flags(data, script, tmp_path / "r"), *arguments, code=2)
        assert not script.bodies
    assert message in message_of(result)
    assert not (tmp_path / "r").exists()


def test_a_second_run_into_the_same_folder_needs_resume(data, tmp_path):
    with serving(Script(adds)) as script:
        run(*flags(data, script, tmp_path / "r"), "--baseline")
        result = run(*flags(data, script, tmp_path / "r"), "--baseline", code=2)
        assert "go on with it (--resume)" in message_of(result)
        other = (*flags(data, script, tmp_path / "r"), *POLICY, "--resume")
        assert "policy.policy was 'fixed', is 'reset'" in message_of(run(*other, code=2))


def test_greedy_samples_and_a_task_of_another_size_are_remarked(tmp_path):
    path = tmp_path / "aime.jsonl"
    path.write_text('{"problem": "What is 3 + 1?", "answer": "004"}\n')
    with serving(Script(adds)) as script:
        arguments = [*flags(path, script, tmp_path / "r"), "--baseline", "--base-temp", "0"]
        result = run(*arguments, "--task", "aime25")
    assert "aime25 has 30 problems, these data hold 1" in message_of(result)
    assert "is greedy: all samples of a problem are alike" in message_of(result)


def test_a_toy_model_through_transformers(data, tmp_path):
    """A random model answers letters; the score is 0, and everything else is as it should be."""
    folder = save_toy(tmp_path / "toy")
    arguments = ("--task", "jsonl", "--data", data, "--model", folder, "--max-problems", "2")
    policy = ("--t-low", "0.3", "--tau0", "2.0", "--max-tokens", "12", "--n-samples", "2")
    run(*arguments, *policy, "--output", tmp_path / "r")
    samples = read_samples(tmp_path / "r")
    assert len({sample["text"] for sample in samples}) == 4
    assert json.loads((tmp_path / "r" / SCORES).read_text())["score"]["mean"] == 0.0


def test_help_names_the_commands_and_every_flag_that_scripts_rely_on():
    overview = run("--help").stdout
    assert all(name in overview for name in ("score", "report", "compare"))
    (command,) = (one for one in run_command.app.registered_commands if one.name == "score")
    found = typer.main.get_command_from_info(
        command, pretty_exceptions_short=False, rich_markup_mode=None
    )
    named = {flag for parameter in found.params for flag in parameter.opts}
    assert set(FLAGS) <= named
