r"""Whether an answer to a problem is right, decided exactly.

A chain has one right number. A search has many right expressions: one counts if it uses only the
numbers given, each at most once, with + - x / and brackets, divides without remainder, never falls
below 1 on the way, and makes the target. `grade` has the form that `reset.evaluate.runner` wants.

Expressions come from a model, so they are parsed here, never evaluated as code.
"""

from __future__ import annotations

import json
import re

from lab.pocket_reasoner.arithmetic import Chain
from lab.pocket_reasoner.problems import problem_id
from lab.pocket_reasoner.search import Search
from reset.evaluate.graders.boxes import last_box
from reset.evaluate.graders.verdict import UNPARSED, Grade
from reset.evaluate.problems import Answer, Problem

_TOKEN = re.compile(r"[0-9]{1,6}|[-+x/()]")
_NUMBER = re.compile(r"[0-9]{1,12}")
_LONGEST = 200  # characters of an expression
_DEEPEST = 16  # brackets within brackets


def as_task_problem(problem: Chain | Search) -> Problem:
    """The form of a problem that the evaluation tools pass around."""
    name = problem_id(problem)
    if isinstance(problem, Chain):
        return Problem(name, problem.question, "integer", str(problem.answer), source="chain")
    # The right answer of a search is a rule: these are its parameters, read back by `grade`.
    rule = json.dumps({"numbers": problem.numbers, "target": problem.target})
    return Problem(name, problem.question, "maths", rule, source="search")


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
    if problem.source == "chain":
        given = int(box) if _NUMBER.fullmatch(box) else None
        return Grade(given == int(problem.answer), box, f"right is {problem.answer}")
    rule = json.loads(problem.answer)
    fault = search_fault(box, rule["numbers"], rule["target"])
    return Grade(fault is None, box, fault or "makes the target")


def search_fault(expression: str, numbers: list[int], target: int) -> str | None:
    """What is wrong with an expression, None if nothing is."""
    if len(expression) > _LONGEST:
        return f"longer than {_LONGEST} characters"
    tokens = _TOKEN.findall(expression)
    if "".join(tokens) != expression:
        return "holds something other than numbers, + - x / and brackets"
    left = list(numbers)
    for token in tokens:
        if token.isdigit():
            if str(int(token)) != token or int(token) not in left:
                return f"{token} is not given, or used more than once"
            left.remove(int(token))
    try:
        value = _Parser(tokens).whole()
    except _UnsoundError as error:
        return str(error)
    return None if value == target else f"makes {value}, not {target}"


class _UnsoundError(ValueError):
    """An expression that has no value by the rules of the game."""


class _Parser:
    """Value of an expression; x and / bind tighter, equals from the left."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0
        self._depth = 0

    def whole(self) -> int:
        value = self._sum()
        if self._next < len(self._tokens):
            raise _UnsoundError(f"{self._tokens[self._next]!r} is out of place")
        return value

    def _sum(self) -> int:
        value = self._product()
        while (sign := self._peek()) in ("+", "-"):
            self._next += 1
            other = self._product()
            value = value + other if sign == "+" else value - other
            if value < 1:
                raise _UnsoundError(f"falls to {value} on the way")
        return value

    def _product(self) -> int:
        value = self._atom()
        while (sign := self._peek()) in ("x", "/"):
            self._next += 1
            other = self._atom()
            if sign == "/" and value % other:
                raise _UnsoundError(f"{value}/{other} leaves a remainder")
            value = value * other if sign == "x" else value // other
        return value

    def _atom(self) -> int:
        token = self._peek()
        self._next += 1
        if token is not None and token.isdigit():
            return int(token)
        if token != "(":
            missing = token is None
            raise _UnsoundError("a number is missing" if missing else f"{token!r} is misplaced")
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _UnsoundError(f"more than {_DEEPEST} brackets deep")
        value = self._sum()
        if self._peek() != ")":
            raise _UnsoundError("a bracket is not closed")
        self._next += 1
        self._depth -= 1
        return value

    def _peek(self) -> str | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None
