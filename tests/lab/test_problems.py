"""Splits: disjoint, fixed, and what the commands print."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from lab.pocket_reasoner.arithmetic import Chain
from lab.pocket_reasoner.problems import (
    EVALUATION,
    FAMILIES,
    SPLITS,
    TRAINING,
    Difficulty,
    make_problems,
    problem_id,
    solution,
    split_of,
    training_example,
)
from lab.pocket_reasoner.search import Search, SearchDifficulty

from reset.evaluate.graders import Grader
from reset.evaluate.problems import Answer
from reset.evaluate.tasks import load_task

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_splits_share_no_problem(family):
    found = {split: {p.question for p in make_problems(family, split, 300)} for split in SPLITS}
    assert all(len(questions) == 300 for questions in found.values())
    assert not found["train"] & found["calibration"]
    assert not found["train"] & found["evaluation"]
    assert not found["calibration"] & found["evaluation"]


def test_training_examples_come_from_the_training_split_alone():
    draw = random.Random(0)
    # Few problems there are, so that a leak would be seen: 3-number searches below 8.
    easy = Difficulty(search=SearchDifficulty(numbers=(3, 3), largest=8), chain_share=0.0)
    held_out = {
        problem.question
        for split in ("calibration", "evaluation")
        for problem in make_problems("search", split, 8, difficulty=easy)
    }
    seen = {training_example(draw, easy)[0] for _ in range(3000)}
    assert len(seen) > 200
    assert not seen & held_out


def test_the_split_of_a_problem_depends_on_its_content_alone():
    assert split_of(Search((3, 7, 8), 29)) == split_of(Search((3, 7, 8), 29))
    draw = random.Random(5)
    shares = {split: 0 for split in SPLITS}
    for _ in range(20_000):
        problem = Chain(draw.randint(1, 9999), (("+", draw.randint(1, 9999)),))
        shares[split_of(problem)] += 1
    assert shares["calibration"] / 20_000 == pytest.approx(0.02, abs=0.004)
    assert shares["evaluation"] / 20_000 == pytest.approx(0.03, abs=0.005)


def test_the_same_arguments_give_the_same_problems():
    first, again = (make_problems("search", "evaluation", 20) for _ in range(2))
    other = make_problems("search", "evaluation", 20, seed=1)
    assert first == again != other
    assert len({problem_id(problem) for problem in first}) == 20


def test_evaluation_is_the_hard_end_of_training():
    assert EVALUATION.chain.steps[1] == TRAINING.chain.steps[1]
    assert EVALUATION.search.numbers[1] == TRAINING.search.numbers[1]
    chains = make_problems("chain", "evaluation", 50)
    assert min(len(chain.operations) for chain in chains) == EVALUATION.chain.steps[0]


def printed(*flags):
    command = [sys.executable, "-m", "lab.pocket_reasoner.problems", "--count", "5", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_printed_is_a_task_of_reset_run(tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text(printed())
    task = load_task("jsonl", [file])
    asked = [one for family in FAMILIES for one in make_problems(family, "evaluation", 5)]
    assert [problem.question for problem in task.problems] == [one.question for one in asked]
    assert [problem.id for problem in task.problems] == [problem_id(one) for one in asked]
    draw = random.Random(1)
    with Grader() as grader:
        for problem, one in zip(task.problems, asked, strict=True):
            worked = solution(one, draw, EVALUATION)
            assert grader.grade(Answer(worked, "stop", 1), problem).correct
            assert not grader.grade(Answer("\\boxed{1}", "stop", 1), problem).correct


def test_a_family_alone(tmp_path):
    assert printed("--family", "chain") + printed("--family", "search") == printed()
    assert {json.loads(line)["kind"] for line in printed("--family", "search").splitlines()} == {
        "target"
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sums", "train", 1), "family is 'sums'"),
        (("chain", "test", 1), "split is 'test'"),
        (("chain", "train", 0), "count is 0"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_problems(*arguments)


@pytest.mark.parametrize(
    ("largest", "message"),
    [(9, "only 2 different search problems"), (5, "no search problem of split evaluation")],
)
def test_more_problems_than_there_are(largest, message):
    few = Difficulty(search=SearchDifficulty(numbers=(2, 2), largest=largest, target=(5, 40)))
    with pytest.raises(ValueError, match=message):
        make_problems("search", "evaluation", 50, difficulty=few)
