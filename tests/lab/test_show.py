"""The demo's second act, on a model that was trained for seconds: shown, judged, kept."""

from __future__ import annotations

import io
import re
import sys

import pytest
from examples import demo
from lab.pocket_reasoner import show
from lab.pocket_reasoner.problems import FAMILIES, make_problems
from lab.pocket_reasoner.trained import read_trained
from rich.console import Console

from tests.lab.conftest import EASY, PLAN

SETTINGS = {"t_low": 0.1, "t_high": 0.6, "seed": 7}


@pytest.fixture(scope="module")
def shown(trained, tmp_path_factory):
    output = tmp_path_factory.mktemp("pages")
    console = Console(file=io.StringIO(), width=100)
    found = show.show(trained[0], output, console=console, **SETTINGS)
    return found, console.file.getvalue(), output


def test_the_answers_are_shown_whole_with_their_verdicts(shown):
    found, text, _ = shown
    assert list(found) == list(FAMILIES)
    for family, (trace, verdict) in found.items():
        (problem,) = make_problems(family, "evaluation", 1, difficulty=EASY)
        _, question, rest = text.partition(f"{problem.question}\n")
        assert question
        body, _, told = rest.partition("\nchecker: ")
        told_as = "right" if verdict.correct else "wrong"
        assert told.startswith(f"{told_as}: {verdict.detail}")
        # Without the numbers of steps and the margins it is the model's text.
        steps = re.findall(r"^ *(\d+)   (.*(?:\n {7}.*)*)", body, re.MULTILINE)
        assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
        said = "\n\n".join(step.replace("\n" + " " * 7, "\n") for _, step in steps)
        whole = "".join(token.text for token in trace.tokens).removesuffix("<|end|>")
        assert said.rstrip() == whole.rstrip()


def test_tau_0_is_of_this_model(trained, shown):
    found, text, _ = shown
    config = found["chain"][0].policy
    assert f"tau_0 {round(config['tau_0'], 4)} nats" in text
    assert config["tau_0"] > 0
    assert (config["t_low"], config["t_high"]) == (0.1, 0.6)


def test_each_family_has_its_trace_page(shown):
    found, text, output = shown
    for family in FAMILIES:
        page = (output / f"pocket-{family}.html").read_text(encoding="utf-8")
        assert page.endswith("</html>\n")
        assert f"trace page: {output}/pocket-{family}.html\n" in text
        assert f'"token_id":{found[family][0].tokens[-1].token_id},' in page


def test_words_of_judgement_are_coloured():
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    writer = show.StepWriter(console)
    for piece in ("back ", "6", " yes", "\n\n", "1", "\n", "2", " no", "\n\n", "\\boxed{", "7"):
        writer.push(piece)
    said = console.file.getvalue()
    assert "\x1b[1;32m yes\x1b[0m\n" in said
    assert "\x1b[1;31m no\x1b[0m\n" in said
    assert "\x1b[1m7\x1b[0m" in said
    assert re.sub(r"\x1b\[[0-9;]*m", "", said) == (
        "   1   back 6 yes\n   2   1\n       2 no\n   3   \\boxed{7"
    )


def test_the_command_line(trained, tmp_path, monkeypatch):
    folder = trained[0]
    arguments = ["show", "--model", str(folder), "--output", str(tmp_path / "none")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="none: is no folder"):
        show.main()
    monkeypatch.setattr(sys, "argv", [*arguments[:-1], str(tmp_path), "--t-low", "2"])
    with pytest.raises(SystemExit, match="t_low must not exceed t_high"):
        show.main()
    monkeypatch.setattr(sys, "argv", ["show", "--model", str(tmp_path), "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"training\.json"):
        show.main()


def test_the_facts_of_a_training_are_read_back(trained, tmp_path):
    folder, facts = trained
    found = read_trained(folder)
    assert found.difficulty == EASY
    assert (found.problems, found.max_tokens) == (PLAN.problems, PLAN.max_tokens)
    assert found.accuracy == facts["calibration_accuracy"]
    (tmp_path / "training.json").write_text('{"difficulty": {}}')
    with pytest.raises(ValueError, match=r"is not as lab.* writes it"):
        read_trained(tmp_path)


def test_without_a_model_the_demo_says_so_in_one_line(tmp_path, capsys):
    demo.second_act(tmp_path, tmp_path)
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert line.startswith(f"no second act: {tmp_path} holds no model")


def test_the_second_act_of_the_demo(trained, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(demo.ROOT)
    (tmp_path / "pocket-nvfp4").symlink_to(trained[0])  # what is quantised is not quantised again
    demo.second_act(trained[0], tmp_path)
    told = capfd.readouterr().out
    assert "reset-quantize" not in told
    assert "$ python -m lab.pocket_reasoner.show --model" in told
    assert told.count("checker: ") == told.count("trace page: ") == 2
    pages = {path.name for path in tmp_path.glob("*.html")}
    assert pages == {"pocket-chain.html", "pocket-search.html"}
