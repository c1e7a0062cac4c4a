"""A run from problems to scores, on scripted answers."""

from __future__ import annotations

import json

import pytest

from reset.evaluate.problems import Answer
from reset.evaluate.report import DegenerateOutputError
from reset.evaluate.runner import graded, request_seed, run
from reset.evaluate.store import PROBLEMS, SAMPLES, SCORES, SETTINGS, read_samples
from tests.reset.evaluate.scripted import (
    FIXED,
    Mark,
    ScriptedEngine,
    WordGrader,
    plan,
    scripted_answer,
    task,
)


def scores(folder):
    return (folder / SCORES).read_bytes()


def test_the_report_counts_what_the_script_said(tmp_path):
    wanted = plan()
    report = run(wanted, ScriptedEngine(), WordGrader(), tmp_path / "run")
    answers = [
        [scripted_answer(wanted.request(problem, number)) for number in range(3)]
        for problem in wanted.task.problems
    ]
    right = [[answer.text.endswith("7") for answer in row] for row in answers]
    flat = [answer for row in answers for answer in row]
    assert list(report.correct.values()) == right
    assert report.score.mean == pytest.approx(sum(map(sum, right)) / 18)
    assert report.seed_means == tuple(
        pytest.approx(sum(row[number] for row in right) / 6) for number in range(3)
    )
    assert report.truncated == pytest.approx(
        sum(answer.finish_reason == "length" for answer in flat) / 18
    )
    assert report.tokens_per_answer == pytest.approx(sum(answer.tokens for answer in flat) / 18)
    assert (report.problems, report.samples, report.unparsed) == (6, 18, 0)


def test_h9_everything_that_decides_the_score_is_kept_beside_it(tmp_path):
    run(plan(system="Be brief."), ScriptedEngine(), WordGrader(), tmp_path / "run")
    settings = json.loads((tmp_path / "run" / SETTINGS).read_text())
    assert settings["seeds"] == [0, 1, 2]
    assert settings["policy"] == FIXED.to_dict()
    assert settings["task_sha256"] == task().sha256
    assert settings["engine"]["versions"] == {"script": "1"}
    assert "\\boxed" in settings["prompt_templates"][0]
    rows = [json.loads(line) for line in (tmp_path / "run" / PROBLEMS).read_text().splitlines()]
    assert rows[2]["id"] == "p2"
    assert rows[2]["prompt"].startswith("<user>What is problem 2?")
    assert [message["role"] for message in rows[2]["messages"]] == ["system", "user"]
    samples = read_samples(tmp_path / "run")
    assert len(samples) == 18
    assert {"text", "seed", "finish_reason", "tokens", "correct", "extracted"} <= set(samples[0])


def test_every_sample_has_a_seed_of_its_own_that_resuming_does_not_change(tmp_path):
    engine = ScriptedEngine()
    run(plan(), engine, WordGrader(), tmp_path / "run")
    seeds = [request.seed for request in engine.asked]
    assert len(set(seeds)) == 18
    assert request_seed(2, "p1") in seeds
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_an_engine_that_gives_up_loses_nothing_and_nothing_is_graded_twice(tmp_path):
    run(plan(), ScriptedEngine(), WordGrader(), tmp_path / "whole")
    grader, engine = WordGrader(), ScriptedEngine(fail_after=7)
    with pytest.raises(OSError, match="the endpoint is gone"):
        run(plan(), engine, grader, tmp_path / "run")
    assert len(read_samples(tmp_path / "run")) == grader.calls == 7
    assert not (tmp_path / "run" / SCORES).exists()
    rest = ScriptedEngine()
    run(plan(), rest, grader, tmp_path / "run", resume=True)
    assert len(rest.asked) == 11
    assert grader.calls == 18
    assert scores(tmp_path / "run") == scores(tmp_path / "whole")
    done = ScriptedEngine()
    run(plan(), done, grader, tmp_path / "run", resume=True)
    assert (len(done.asked), grader.calls) == (0, 18)
    assert scores(tmp_path / "run") == scores(tmp_path / "whole")


def test_an_old_score_is_gone_or_right_when_a_run_is_extended_by_hand(tmp_path):
    """Samples that vanish are asked for again; the score is of what is there."""
    run(plan(), ScriptedEngine(), WordGrader(), tmp_path / "run")
    before = scores(tmp_path / "run")
    file = tmp_path / "run" / SAMPLES
    file.write_text("".join(f"{line}\n" for line in file.read_text().splitlines()[:-5]))
    engine = ScriptedEngine()
    run(plan(), engine, WordGrader(), tmp_path / "run", resume=True)
    assert len(engine.asked) == 5
    assert scores(tmp_path / "run") == before


def answer_of(texts):
    """A script that gives problem n the n-th text."""

    def script(request):
        number = int(request.messages[-1][1].split("problem ")[1].split("?")[0])
        text = texts[number]
        return text if isinstance(text, Answer) else Answer(text, "stop", len(text.split()))

    return script


def test_h7_truncated_answers_are_told_apart(tmp_path):
    cut = Answer("I was about to", "length", 100)
    script = answer_of(["answer 7", "answer 7", "answer 8", cut])
    grader = WordGrader()
    report = run(plan(4, n_samples=1), ScriptedEngine(script), grader, tmp_path / "run")
    assert report.truncated == 0.25
    assert report.unparsed == 0.25
    assert report.score.mean == 0.5
    assert report.score_completed == pytest.approx(2 / 3)


def test_h10_degenerate_output_is_kept_and_not_scored(tmp_path):
    texts = ["answer 7"] * 18 + ["!" * 100, ""]
    one_of_twenty = ["answer 7"] * 19 + ["!" * 100]
    with pytest.raises(
        DegenerateOutputError, match=r"2 of 20 answers are degenerate \(1 of them b"
    ):
        run(
            plan(20, n_samples=1),
            ScriptedEngine(answer_of(texts)),
            WordGrader(),
            tmp_path / "bad",
        )
    assert len(read_samples(tmp_path / "bad")) == 20
    assert not (tmp_path / "bad" / SCORES).exists()
    engine = ScriptedEngine(answer_of(one_of_twenty))
    report = run(plan(20, n_samples=1), engine, WordGrader(), tmp_path / "good")
    assert report.degenerate == 0.05


def test_a_model_that_answers_nothing_gets_no_score(tmp_path):
    engine = ScriptedEngine(lambda request: Answer("", "stop", 1))
    with pytest.raises(DegenerateOutputError, match="18 of 18 answers"):
        run(plan(), engine, WordGrader(), tmp_path / "run")


def test_h10_a_broken_model_is_told_after_twenty_answers(tmp_path):
    engine = ScriptedEngine(lambda request: Answer("!" * 100, "length", 100))
    with pytest.raises(DegenerateOutputError, match="20 of 20 answers"):
        run(plan(40), engine, WordGrader(), tmp_path / "run")
    assert len(engine.asked) == 20


@pytest.mark.parametrize(("text", "right"), [("80", True), ("81", True), ("82", False)])
def test_either_of_two_accepted_answers_is_right(text, right):
    (problem,) = task(1, answer="80 or 81").problems
    grade = graded(Answer(f"answer {text}", "stop", 2), problem, WordGrader())
    assert grade == Mark(right, text)


def test_progress_counts_what_was_there_before(tmp_path):
    seen = []
    with pytest.raises(OSError, match="gone"):
        run(plan(), ScriptedEngine(fail_after=4), WordGrader(), tmp_path / "run")
    run(
        plan(),
        ScriptedEngine(),
        WordGrader(),
        tmp_path / "run",
        resume=True,
        on_progress=lambda *numbers: seen.append(numbers),
    )
    assert seen[0] == (4, 18, 0)
    assert seen[-1][:2] == (18, 18)
    assert [done for done, _, _ in seen] == list(range(4, 19))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_samples": 0}, "n_samples is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**31 - 2}, "seed is 2147483646"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"min_p": 1.0}, "min_p is 1.0"),
    ],
)
def test_values_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        plan(**change)
