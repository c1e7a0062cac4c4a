"""One entry for every kind of problem."""

from __future__ import annotations

import json
import sys
import time

import pytest

from reset.evaluate.graders import Grade, Grader, SandboxError, grade
from reset.evaluate.problems import Answer, Problem

CASES = json.dumps([{"input": "2", "output": "4", "testtype": "stdin"}])
CODE = Problem("lcb-1", "Double.", "code", "", tests=json.dumps({"public_test_cases": CASES}))
PROBLEMS = [
    Problem("aime-1", "Add.", "integer", "042"),
    Problem("gsm8k-1", "Add.", "maths", "42"),
    Problem("gpqa-1", "Which?", "choice", "B", choices=("1", "2", "3", "4")),
    CODE,
]
RIGHT = [r"\boxed{42}", "#### 42", "Answer: B", "```python\nprint(2 * int(input()))\n```"]


@pytest.mark.parametrize(("problem", "text"), zip(PROBLEMS, RIGHT, strict=True), ids=str)
def test_each_kind_has_its_grader(problem, text):
    verdict = grade(Answer(text, "stop", 9), problem)
    assert verdict.correct
    assert verdict.extracted
    assert grade(Answer("I do not know.", "stop", 5), problem) == Grade(
        False, None, "no answer found"
    )


def test_one_grader_serves_all():
    with Grader() as grader:
        verdicts = [
            grader.grade(Answer(text, "stop", 9), problem)
            for problem, text in zip(PROBLEMS, RIGHT, strict=True)
        ]
    assert [verdict.correct for verdict in verdicts] == [True] * 4


def test_what_is_needed_is_checked_before_anything_is_generated(monkeypatch):
    with Grader() as grader:
        assert grader.check(PROBLEMS[:3]) == {}
        assert set(grader.check(PROBLEMS)) == {"namespaces", "read_only_files"}
        with pytest.raises(ValueError, match="problem lcb-2: has no tests"):
            grader.check([Problem("lcb-2", "Double.", "code", "", tests="{}")])
        with monkeypatch.context() as patch:
            patch.setattr(sys, "platform", "darwin")
            with pytest.raises(SandboxError, match="on Linux only"):
                grader.check([CODE])
        monkeypatch.setitem(sys.modules, "math_verify", None)
        with pytest.raises(ImportError, match="math-verify"):
            grader.check(PROBLEMS[:1])


FORMS = [
    ("integer", "204", r"\boxed{204}"),
    ("integer", "7", r"\boxed{\frac{14}{2}}"),
    ("maths", r"\frac{1}{2}", r"\boxed{\dfrac{2}{4}}"),
    ("maths", r"2\sqrt{3}", r"\boxed{\sqrt{12}}"),
    ("maths", "x^2+1", r"\boxed{1+x^{2}}"),
    ("choice", "B", "Answer: B"),
]


def test_960_answers_are_graded_in_a_minute():
    """A quarter of them in a quarter of it; two thirds need math-verify."""
    began = time.monotonic()
    with Grader() as grader:
        for number in range(240):
            kind, right, text = FORMS[number % len(FORMS)]
            problem = Problem(str(number), "Q", kind, right, ("x", "y") if kind == "choice" else ())
            answer = Answer(f"{'Let us see. ' * 500}{text}", "stop", 1500)
            assert grader.grade(answer, problem).correct
    assert time.monotonic() - began < 15
