r"""Number targets: an expression that makes a number of given ones, checked by computing it.

    Use 1, 20, 23, 25 to make 78.      \boxed{(23-20)x(1+25)}

Any expression is right that uses only the numbers given, each at most as often as it is given, with
+ - x / and brackets, divides without remainder, never falls below 1 on the way, and makes the
target: the rules of the numbers round of "Countdown". Signs may be written as models write them
(`*`, `\times`, `\div`), and `= 78` may stand behind.

Expressions come from a model, so they are parsed here, never evaluated as code. Knows no task.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from reset.evaluate.graders.boxes import final_answer
from reset.evaluate.graders.verdict import UNPARSED, Grade
from reset.evaluate.problems import Answer, Problem

_TOKEN = re.compile(r"[0-9]{1,6}|[-+x/()]")
_SIGNS = (
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])|[*×·]"), "x"),
    (re.compile(r"\\div(?![A-Za-z])|÷"), "/"),
    (re.compile(r"−"), "-"),
    (re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[,;:! ]|\$|\\[()]"), " "),
)
_LONGEST = 200  # characters of an expression
_DEEPEST = 16  # brackets within brackets


def target_answer(numbers: Sequence[int], target: int) -> str:
    """The `answer` of a "target" problem: the right answer is a rule, these are its parameters.

    Raises:
        ValueError: no numbers, or one of them or the target is below 1.
        TypeError: one of them is no integer.
    """
    if not numbers:
        raise ValueError("numbers is empty; need at least one to make the target of")
    for name, value in (("target", target), *(("number", number) for number in numbers)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}; need an integer")
        if not 1 <= value <= 999_999:
            raise ValueError(f"{name} is {value}; need 1 to 999999")
    return json.dumps({"numbers": list(numbers), "target": target})


def grade_target(answer: Answer, problem: Problem) -> Grade:
    """Whether the last box, or the last "answer is ...", holds an expression that is right.

    Raises:
        ValueError: `problem.answer` was not made by `target_answer`.
    """
    try:
        rule = json.loads(problem.answer)
        numbers, target = rule["numbers"], rule["target"]
        target_answer(numbers, target)
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(
            f"problem {problem.id}: the answer is {problem.answer!r}; need an object of numbers "
            "and target"
        ) from error
    given = final_answer(answer.text)
    if given is None:
        return UNPARSED
    fault = target_fault(given, numbers, target)
    return Grade(fault is None, given, fault or f"makes {target}")


def target_fault(expression: str, numbers: Sequence[int], target: int) -> str | None:
    """What is wrong with an expression, None if nothing is."""
    if len(expression) > _LONGEST:
        return f"longer than {_LONGEST} characters"
    for pattern, sign in _SIGNS:
        expression = pattern.sub(sign, expression)
    made, equals, result = expression.rpartition("=")
    if equals and result.strip() == str(target):
        expression = made
    tokens = _TOKEN.findall(expression)
    if "".join(tokens) != re.sub(r"\s", "", expression):
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
