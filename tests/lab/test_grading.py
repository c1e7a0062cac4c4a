"""The checker against hostile answers."""

from __future__ import annotations

import random

import pytest
from lab.pocket_reasoner.arithmetic import Chain
from lab.pocket_reasoner.grading import as_task_problem, grade
from lab.pocket_reasoner.problems import EVALUATION, FAMILIES, make_problems, solution
from lab.pocket_reasoner.search import Search

from reset.evaluate.problems import Answer, Problem

SEARCH = Search((2, 3, 8, 10), 26)
CHAIN = Chain(40, (("+", 2),))


def graded(text, problem, finish_reason="stop"):
    return grade(Answer(text, finish_reason, 1), as_task_problem(problem))


@pytest.mark.parametrize("family", FAMILIES)
def test_worked_solutions_are_right(family):
    draw = random.Random(1)
    for problem in make_problems(family, "evaluation", 100):
        assert graded(solution(problem, draw, EVALUATION), problem).correct


@pytest.mark.parametrize(
    ("text", "correct", "extracted"),
    [
        ("\\boxed{42}", True, "42"),
        ("\\boxed{41}\n\n\\boxed{42}", True, "42"),
        ("\\boxed{42}\n\n\\boxed{41}", False, "41"),
        ("\\boxed{42.0}", False, "42.0"),
        ("\\boxed{ 42 }", True, "42"),
        ("\\boxed{-42}", False, "-42"),
        ("\\boxed{40+2}", False, "40+2"),
        ("\\boxed{" + "4" * 5000 + "}", False, "4" * 5000),
        ("42", False, None),
        ("\\boxed{42", False, None),
        ("\\boxed{}", False, None),
        ("", False, None),
    ],
)
def test_chains(text, correct, extracted):
    found = graded(text, CHAIN)
    assert (found.correct, found.extracted) == (correct, extracted)


def test_an_answer_that_was_cut_off_is_wrong_even_with_the_right_box():
    assert not graded("\\boxed{42}", CHAIN, "length").correct
    assert not graded("\\boxed{8x2+10}", SEARCH, "length").correct
    assert graded("\\boxed{8x2+10}", SEARCH).correct


def test_the_target_alone_is_no_answer():
    assert not graded("\\boxed{26}", SEARCH).correct


def test_problems_of_another_origin_are_refused():
    with pytest.raises(ValueError, match="none of the pocket reasoner's"):
        grade(Answer("\\boxed{1}", "stop", 1), Problem("p", "1?", "integer", "1"))
