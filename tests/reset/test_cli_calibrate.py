"""The search of reset-calibrate as a user runs it: a scripted server, and a toy model."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from reset import ReSETConfig
from reset.calibrate import text_sha256
from reset.cli import calibrate
from reset.cli import run as run_command
from reset.evaluate.store import SCORES, read_samples
from tests.reset.evaluate.server import Script, chat_reply, serving
from tests.reset.toy_model import save_toy

RUNNER = CliRunner()
GRID = ("--t-lows", "0.1", "--t-highs", "0.6")
ARMS = ("greedy", "fixed-0.3", "fixed-0.6", "fixed-1", "reset-0.1-0.6")


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"problem": f"What is {n} + 1?", "answer": n + 1} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def temperature(body):
    """The one temperature of a request, or None: it has a policy."""
    return None if body.get("vllm_xargs", {}).get("reset") else body["temperature"]


def server(is_good):
    """Adds rightly where `is_good(temperature)`, else about one time in four."""

    def reply(_, body):
        number = int(body["messages"][-1]["content"].split("What is ")[1].split(" ")[0])
        right = is_good(temperature(body)) or body["seed"] % 4 == 0
        return chat_reply(f"Adding one gives \\boxed{{{number + 1 if right else 0}}}.", tokens=9)

    return Script(reply)


def run(app, *arguments, code=0):
    result = RUNNER.invoke(app, [str(one) for one in arguments])
    assert result.exit_code == code, result.output
    return result


def flags(data, script, output, *more):
    return (
        *("--model", "toy", "--engine", script.url, "--retries", "0", "--tau0", "0.6"),
        *("--data", data, "--output", output, "--max-tokens", "50"),
        *("--search", "--search-problems", "16", "--n-samples", "1", *GRID, *more),
    )


def message_of(result):
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())


def test_a_fixed_temperature_is_recommended_stored_and_honoured(data, tmp_path):
    file = tmp_path / "cal.json"
    with serving(server(lambda value: value == 0.3)) as script:
        result = run(calibrate.app, *flags(data, script, file))
    assert "use a fixed temperature of 0.3: the best of ReSET" in result.stdout
    for arm in ARMS:
        assert arm in result.stdout
    written = json.loads(file.read_text())
    assert written["config"] == {"tau_0": 0.6, "policy": "fixed", "base_temp": 0.3}
    assert written["recommendation"] in " ".join(result.stdout.split())
    assert ReSETConfig.from_file(file) == ReSETConfig(policy="fixed", base_temp=0.3, tau_0=0.6)
    search = written["search"]
    assert [arm["name"] for arm in search["arms"]] == list(ARMS)
    assert (search["kind"], search["best_fixed"], search["folder"]) == (
        *("fixed", "fixed-0.3", "cal.search"),
    )
    samples = [read_samples(tmp_path / "cal.search" / arm) for arm in ARMS]
    assert [len(one) for one in samples] == [16] * 5
    with serving(server(lambda value: value == 0.3)) as script:
        other = tmp_path / "other.jsonl"
        other.write_text('{"problem": "What is 99 + 1?", "answer": 100}\n')
        arguments = ("--model", "toy", "--task", "jsonl", "--data", other, "--engine", script.url)
        output = ("--n-samples", "1", "--output", tmp_path / "r")
        run(run_command.app, *arguments, *output, "--preset", file)
        assert [temperature(body) for body in script.bodies] == [0.3]


def test_reset_is_recommended_and_kept_under_a_name(data, tmp_path):
    file = tmp_path / "presets.json"
    file.write_text('{"presets": {"other": {"config": {"tau_0": 0.9}}}}')
    with serving(server(lambda value: value is None)) as script:
        result = run(calibrate.app, *flags(data, script, file, "--name", "org/toy", "--json"))
        assert "use it as --preset" in result.stderr
        found = json.loads(result.stdout)
        assert found["recommendation"].startswith("ReSET at T_low 0.1, T_high 0.6: +")
        assert ReSETConfig.from_file(file, name="org/toy") == ReSETConfig(
            t_low=0.1, t_high=0.6, tau_0=0.6
        )
        assert json.loads(file.read_text())["presets"]["other"] == {"config": {"tau_0": 0.9}}
        assert (tmp_path / "presets.org-toy.search" / "greedy" / SCORES).exists()
        arguments = ("--model", "toy", "--task", "jsonl", "--data", data, "--ids", "content")
        output = ("--engine", script.url, "--output", tmp_path / "r")
        refused = run(run_command.app, *arguments, *output, "--preset", f"{file}:org/toy", code=2)
    assert "was calibrated on 16 problems of this task" in message_of(refused)


def test_no_difference_leaves_the_choice_to_the_user_and_an_evaluation_is_left_out(data, tmp_path):
    file, test = tmp_path / "cal.json", tmp_path / "test.jsonl"
    test.write_text('{"Question": "What is 0 + 1?"}\n{"Question": "What is 2 + 1?"}\n')
    with serving(server(lambda _: False)) as script:
        result = run(calibrate.app, *flags(data, script, file, "--apart-from", test))
    assert "no difference shown: the best of ReSET" in result.stdout
    assert "none was shown better" in message_of(result)
    assert "16 problems are few" in message_of(result)
    with pytest.raises(ValueError, match='its search ended in "no difference shown'):
        ReSETConfig.from_file(file)
    used = json.loads(file.read_text())["search"]["problems"]
    assert used == [text_sha256(f"What is {n} + 1?") for n in range(18) if n not in (0, 2)]


def test_a_search_that_broke_goes_on_and_ends_as_if_it_had_not(data, tmp_path):
    whole, file = tmp_path / "whole.json", tmp_path / "cal.json"
    good = server(lambda value: value is None)
    with serving(good) as script:
        run(calibrate.app, *flags(data, script, whole, "--resume"))  # there is nothing yet
    broken = Script(lambda n, body: good.reply(n, body) if n < 40 else (500, "out of memory"))
    with serving(broken) as script:
        result = run(calibrate.app, *flags(data, script, file), code=2)
        assert "HTTP 500: out of memory" in message_of(result)
    with serving(server(lambda value: value is None)) as script:
        again = run(calibrate.app, *flags(data, script, file), code=2)
        assert "cal.search: is there already; go on with its search (--resume)" in message_of(again)
        other = run(calibrate.app, *flags(data, script, file, "--resume", "--tau0", "1"), code=2)
        assert "tau_0 was found with other settings: tau0 was 0.6, is 1.0" in message_of(other)
        assert not script.bodies
        run(calibrate.app, *flags(data, script, file, "--resume"))
        assert len(script.bodies) <= 80 - 38  # what was under way beside the failure may be lost
    texts = [path.read_text().replace("whole.search", "cal.search") for path in (whole, file)]
    assert texts[0] == texts[1]


def test_tau_0_first_then_the_search_on_other_problems(data, tmp_path):
    """With a model: the first part decodes three problems, the second none of them."""
    file = tmp_path / "cal.json"
    model = save_toy(tmp_path / "toy")
    base = ("--model", model, "--data", data, "--output", file, "--num-problems", "3")
    limits = ("--max-tokens", "6")
    run(calibrate.app, *base, *limits)
    first = json.loads(file.read_text())
    assert first["search"] is None
    ends = first["tau_0_interval"]
    assert ends["low"] <= first["config"]["tau_0"] <= ends["high"]
    search = (*GRID, "--search", "--search-problems", "4", "--n-samples", "1", "--resume")
    result = run(calibrate.app, *base, *limits, *search)
    second = json.loads(file.read_text())
    asked = [text_sha256(f"What is {n} + 1?") for n in range(7)]
    assert second["problems"] == first["problems"] == asked[:3]
    assert second["search"]["problems"] == asked[3:]
    assert second["config"] == {"tau_0": first["config"]["tau_0"]}
    assert "no difference shown" in result.stdout
    other = save_toy(tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    changed = ("--model", other, *base[2:], *limits, *search)
    refused = run(calibrate.app, *changed, code=2)
    assert "its tau_0 belongs to another model" in message_of(refused)
    refused = run(calibrate.app, *base, "--max-tokens", "7", *search, code=2)
    assert "sampling.max_tokens was 6, is 7" in message_of(refused)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--t-lows", "low"), "--t-lows is 'low'; need numbers with commas between"),
        (("--t-lows", "0.7", "--t-highs", "0.6"), "the grid is empty"),
        (("--t-highs", "0.6,-1"), "t_high is -1"),
        (("--search-problems", "1"), "--search-problems is 1; it must be at least 2"),
        (("--search-problems", "40"), "holds 20 problems with answers besides those left out"),
        (("--n-samples", "0"), "n_samples is 0"),
        (("--max-tokens", "0"), "--max-tokens is 0"),
        (("--top-p", "0"), "--top-p is 0"),
        (("--seed", "-1"), "--seed is -1"),
        (("--temperature", "nan"), "base_temp is nan"),
        (("--t-low", "0.1"), "drop --t-low and --t-high"),
        (("--tau0", "-1"), "tau_0 is -1"),
        (("--task", "maths"), "task is 'maths'"),
        (("--task", "gsm8k"), 'data.jsonl, line 1: has no "question"'),
        (("--data", "problems.txt"), "need a .jsonl file with problems and answers"),
        (("--engine", "vllm", "--tp", "0"), "--tp is 0"),
        (("--name", "a:b"), "a preset's name is 'a:b'"),
        (("--apart-from", "none.txt"), "none.txt: need a .jsonl file"),
    ],
)
def test_bad_flags_are_one_sentence_before_anything_is_asked(data, tmp_path, arguments, message):
    with serving(server(lambda _: True)) as script:
        base = flags(data, script, tmp_path / "cal.json")
        result = run(calibrate.app, *base, *arguments, code=2)
        assert not script.bodies
    assert message in message_of(result)
    assert not (tmp_path / "cal.json").exists()
    assert not (tmp_path / "cal.search").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--engine", "vllm"), "do that first, without --search"),
        (("--resume",), "--resume goes on with a search; pass --search as well"),
    ],
)
def test_what_the_first_part_cannot_do(data, tmp_path, arguments, message):
    base = ("--model", "toy", "--data", data, "--output", tmp_path / "cal.json")
    assert message in message_of(run(calibrate.app, *base, *arguments, code=2))
