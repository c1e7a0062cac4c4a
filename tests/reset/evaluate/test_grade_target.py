"""Expressions that make a number of given ones, against hostile answers."""

from __future__ import annotations

import pytest

from reset.evaluate.graders import Grade, grade
from reset.evaluate.graders.target import target_answer, target_fault
from reset.evaluate.problems import Answer, Problem

NUMBERS, TARGET = [2, 3, 8, 10], 26
PROBLEM = Problem("p", "Make 26.", "target", target_answer(NUMBERS, TARGET))


@pytest.mark.parametrize(
    "expression",
    [
        *("8x2+10", "10+8x2", "(8x2)+10", "2x(3+10)", "((2)x((3+10)))", "10+2x8", "8x3+2"),
        *("8*2+10", "8 × 2 + 10", "8·2+10", r"8 \times 2 + 10", r"8\cdot2+10", "8x2+10=26"),
        *(r"$2 \times \left(3+10\right) = 26$", r"\(8\times 2\,+10\)", "8 + (10 − 2) + 30 ÷ 3"),
    ],
)
def test_right_expressions(expression):
    assert target_fault(expression, [*NUMBERS, 30], TARGET) is None


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("26", "26 is not given"),
        ("8x2+8+2", "8 is not given, or used more than once"),
        ("8x02+10", "02 is not given"),
        ("8x2+10=27", "something other"),
        ("16+10=8x2+10=26", "something other"),
        ("=26", "a number is missing"),
        ("8**2", "'x' is misplaced"),
        ("8//2", "'/' is misplaced"),
        ("__import__('os')", "something other"),
        (r"\frac{8}{2}", "something other"),
        (r"8\timesx2", "something other"),
        ("8x2+1 0", "1 is not given"),
        ("٨x2+10", "something other"),
        ("8x2+10)", r"'\)' is out of place"),
        ("(8x2+10", "not closed"),
        ("8x(2+", "a number is missing"),
        ("8x2+x10", "'x' is misplaced"),
        ("-2+8", "'-' is misplaced"),
        ("()", r"'\)' is misplaced"),
        ("(8)(3)", r"'\(' is out of place"),
        ("8 3", "'3' is out of place"),
        ("10/3x8", "leaves a remainder"),
        ("2-3+10", "falls to -1"),
        ("10/(3-3)", "3 is not given, or used more than once"),
        ("10/(3-2-8)", "falls to -7"),
        ("10+8+2", "makes 20, not 26"),
        ("(" * 17 + "8" + ")" * 17, "more than 16 brackets deep"),
        ("8x2+10" + " " * 300, "longer than 200 characters"),
        ("9" * 150, "is not given"),
        ("", "a number is missing"),
    ],
)
def test_wrong_expressions(expression, why):
    with pytest.raises(ValueError, match=why):
        raise ValueError(target_fault(expression, NUMBERS, TARGET))


def test_subtraction_and_division_go_from_the_left():
    assert target_fault("20-8-2", [2, 8, 20], 10) is None
    assert target_fault("20-8-2", [2, 8, 20], 14) == "makes 10, not 14"
    assert target_fault("20/2/5", [2, 5, 20], 2) is None
    assert target_fault("2+3x4", [2, 3, 4], 14) is None


def test_a_number_may_be_used_as_often_as_it_is_given():
    assert target_fault("5x5", [5, 5], 25) is None
    assert target_fault("5x5", [5, 4], 25) == "5 is not given, or used more than once"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (r"So \boxed{8x2+10}.", Grade(True, "8x2+10", "makes 26")),
        (r"\boxed{10+8}, no: \boxed{2x(3+10)}", Grade(True, "2x(3+10)", "makes 26")),
        (r"\boxed{8x2+10} \boxed{8+10}", Grade(False, "8+10", "makes 18, not 26")),
        ("<think>8+10</think> The answer is 8x2+10.", Grade(True, "8x2+10", "makes 26")),
        (r"\boxed{26}", Grade(False, "26", "26 is not given, or used more than once")),
        ("8x2+10", Grade(False, None, "no answer found")),
    ],
)
def test_answers(text, verdict):
    assert grade(Answer(text, "stop", 9), PROBLEM) == verdict


@pytest.mark.parametrize("answer", ["26", "{}", '{"numbers": [], "target": 26}', "x"])
def test_a_problem_without_its_rule_is_refused(answer):
    with pytest.raises(ValueError, match=r"problem p: the answer is .* need an object of numbers"):
        grade(Answer(r"\boxed{1}", "stop", 1), Problem("p", "Q", "target", answer))


@pytest.mark.parametrize(
    ("numbers", "target", "message"),
    [
        ([], 5, "numbers is empty"),
        ([1, 0], 5, "number is 0; need 1 to"),
        ([1], 0, "target is 0; need 1 to"),
        ([1, "2"], 5, "number is '2'; need an integer"),
        ([1], True, "target is True; need an integer"),
        ([1], None, "target is None; need an integer"),
    ],
)
def test_impossible_rules_are_refused(numbers, target, message):
    with pytest.raises((ValueError, TypeError), match=message):
        target_answer(numbers, target)
