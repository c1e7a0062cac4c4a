"""The checker against hostile answers."""

from __future__ import annotations

import random

import pytest
from lab.pocket_reasoner.arithmetic import Chain
from lab.pocket_reasoner.grading import as_task_problem, grade, search_fault
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
        assert graded(solution(problem, draw, EVALUATION).text, problem).correct


@pytest.mark.parametrize(
    "expression",
    ["8x2+10", "10+8x2", "(8x2)+10", "2x(3+10)", "((2)x((3+10)))", "10+2x8", "8+(3-2)x8-6/3"],
)
def test_right_expressions(expression):
    numbers = [2, 3, 8, 10] if expression != "8+(3-2)x8-6/3" else [8, 3, 2, 8, 6, 3, 99]
    target = 26 if expression != "8+(3-2)x8-6/3" else 14
    assert search_fault(expression, numbers, target) is None


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("26", "26 is not given"),
        ("8x2+8+2", "8 is not given, or used more than once"),
        ("8x3+2", None),
        ("8x02+10", "02 is not given"),
        ("8*2+10", "something other"),
        ("8 x 2 + 10", "something other"),
        ("8x2+10=26", "something other"),
        ("8**2", "something other"),
        ("__import__('os')", "something other"),
        ("8x2+1 0", "something other"),
        ("٨x2+10", "something other"),
        ("8x2+10)", r"'\)' is out of place"),
        ("(8x2+10", "not closed"),
        ("8x(2+", "a number is missing"),
        ("8x2+x10", "'x' is misplaced"),
        ("-2+8", "'-' is misplaced"),
        ("()", r"'\)' is misplaced"),
        ("(8)(3)", r"'\(' is out of place"),
        ("8 3", "something other"),
        ("10/3x8", "leaves a remainder"),
        ("2-3+10", "falls to -1"),
        ("10/(3-3)", "3 is not given, or used more than once"),
        ("10/(3-2-8)", "falls to -7"),
        ("8-8", "8 is not given, or used more than once"),
        ("10+8+2", "makes 20, not 26"),
        ("(" * 17 + "8" + ")" * 17, "more than 16 brackets deep"),
        ("8x2+10" + " " * 300, "longer than 200 characters"),
        ("9" * 150, "is not given"),
        ("", "a number is missing"),
    ],
)
def test_wrong_expressions(expression, why):
    fault = search_fault(expression, [2, 3, 8, 10], 26)
    if why is None:
        assert fault is None
    else:
        with pytest.raises(ValueError, match=why):
            raise ValueError(fault)


def test_subtraction_and_division_go_from_the_left():
    assert search_fault("20-8-2", [2, 8, 20], 10) is None
    assert search_fault("20-8-2", [2, 8, 20], 14) == "makes 10, not 14"
    assert search_fault("20/2/5", [2, 5, 20], 2) is None
    assert search_fault("2+3x4", [2, 3, 4], 14) is None


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
