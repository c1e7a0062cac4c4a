"""Grading: 960 mathematical answers (aime120, eight samples each), and the tests of one program.

    OMP_NUM_THREADS=1 python benchmarks/grading.py

Goal: 960 mathematical answers <= 60 s on two cores. The answers are made up: as long as the chains
of thought of a reasoning model, their boxes in the forms that models write; one in eight is an
expression, which goes to math-verify.
"""

from __future__ import annotations

import json
import random

from harness import record, seconds
from reset.evaluate.graders import Grader
from reset.evaluate.problems import Answer, Problem

PROBLEMS, SAMPLES = 120, 8
CHARACTERS = 60_000  # about 20,000 tokens
TESTS = 40  # of a LiveCodeBench problem, about
SENTENCES = (
    "Wait, let me check that again with $x = {0}$ and $y = \\frac{{{0}}}{{7}}$.",
    "So the sum is ${0} + 17 = {1}$, which the answer cannot be.",
    "Consider the case $\\{{a, b\\}}$ where $a^2 + b^2 = {0}$; there are {1} of them.",
    "Hmm, \\boxed{{{1}}} would need {0} more.\n\n",
)
FORMS = (
    "{0}",
    "{0}",
    "{0}",
    "0{0}",
    "n = {0}",
    "\\textbf{{{0}}}",
    "{0}\\text{{ cm}}",
    "\\frac{{{1}}}{{2}}",  # to math-verify
)


def thought(generator: random.Random) -> str:
    parts: list[str] = []
    length = 0
    while length < CHARACTERS:
        number = generator.randrange(1000)
        parts.append(generator.choice(SENTENCES).format(number, number + 17))
        length += len(parts[-1]) + 1
    return " ".join(parts)


def answers() -> list[tuple[Answer, Problem, bool]]:
    """Answers, two in three of them right."""
    generator = random.Random(0)
    made = []
    for number in range(PROBLEMS):
        right = generator.randrange(1, 1000)
        problem = Problem(f"aime-{number}", "", "integer", str(right))
        for sample in range(SAMPLES):
            is_right = generator.random() < 2 / 3
            said = right if is_right else right + generator.randrange(1, 50)
            box = FORMS[sample % len(FORMS)].format(said, 2 * said)
            text = f"{thought(generator)}</think>\n\nThe answer is $\\boxed{{{box}}}$."
            made.append((Answer(text, "stop", len(text) // 3), problem, is_right))
    return made


def maths() -> None:
    made = answers()

    def grade_all() -> None:
        with Grader() as grader:
            for answer, problem, is_right in made:
                if grader.grade(answer, problem).correct != is_right:
                    raise AssertionError(f"graded wrong: {answer.text[-100:]}")

    figures = seconds(grade_all, repeats=3)
    record("grading", "maths", answers=len(made), characters=CHARACTERS, **figures)


def code() -> None:
    cases = [{"input": f"{n}\n", "output": f"{2 * n}\n", "testtype": "stdin"} for n in range(TESTS)]
    fields = {"public_test_cases": json.dumps(cases)}
    problem = Problem("double", "", "code", "", tests=json.dumps(fields))
    answer = Answer("```python\nprint(2 * int(input()))\n```", "stop", 9)

    def grade() -> None:
        with Grader() as grader:
            if not grader.grade(answer, problem).correct:
                raise AssertionError("a right program failed")

    record("grading", "code", tests=TESTS, **seconds(grade, repeats=3))


def main() -> None:
    maths()
    code()


if __name__ == "__main__":
    main()
