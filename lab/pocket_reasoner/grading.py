"""Whether an answer to a problem is right, decided exactly.

A chain has one right number. A search has many right expressions: `reset.evaluate.graders.target`
computes the one that was given. `grade` has the form that `reset.evaluate.runner` wants; unlike the
graders of `reset-run` it takes an answer that was cut off for wrong.
"""

from __future__ import annotations

import re

from lab.pocket_reasoner.arithmetic import Chain
from lab.pocket_reasoner.problems import problem_id
from lab.pocket_reasoner.search import Search
from reset.evaluate.graders.boxes import last_box
from reset.evaluate.graders.target import grade_target, target_answer
from reset.evaluate.graders.verdict import UNPARSED, Grade
from reset.evaluate.problems import Answer, Problem

_NUMBER = re.compile(r"[0-9]{1,12}")


def as_task_problem(problem: Chain | Search) -> Problem:
    """The form of a problem that the evaluation tools pass around."""
    name = problem_id(problem)
    if isinstance(problem, Chain):
        return Problem(name, problem.question, "integer", str(problem.answer), source="chain")
    rule = target_answer(problem.numbers, problem.target)
    return Problem(name, problem.question, "target", rule, source="search")


def grade(answer: Answer, problem: Problem) -> Grade:
    """The grade of an answer to a problem made by `as_task_problem`.

    Raises:
        ValueError: a problem of another origin.
    """
    if problem.source not in ("chain", "search"):
        raise ValueError(f"problem {problem.id}: is none of the pocket reasoner's")
    if answer.finish_reason != "stop":
        return Grade(False, None, "cut off at the token limit")
    box = last_box(answer.text)
    if box is None:
        return UNPARSED
    if problem.source == "search":
        return grade_target(answer, problem)
    given = int(box) if _NUMBER.fullmatch(box) else None
    return Grade(given == int(problem.answer), box, f"right is {problem.answer}")
