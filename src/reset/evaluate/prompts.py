"""How a problem is put to a model: named forms, kept with every result.

Knows no chat template and no tokenizer. Which form was used decides what a grader can find, so two
scores made with different forms are not comparable.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from reset.evaluate.problems import Problem

PromptForm = Literal["task", "plain"]
FORMS: tuple[PromptForm, ...] = ("task", "plain")
"""`task` says how the answer is to be written; `plain` is the question alone, as the public
reference asks AIME."""

_SLOT = re.compile(r"\{(question|options|starter)\}")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_BOXED = (
    "{question}\n\nWork through the problem step by step. Write the final answer inside \\boxed{}."
)
_CHOICE = (
    "{question}\n\n{options}\n\n"
    "Think it through step by step, then end with one line that reads 'Answer: X', where X is the "
    "letter of the right option."
)
_STANDARD_INPUT = (
    "{question}\n\n"
    "Write a Python 3 program that reads its input from standard input and writes the result to "
    "standard output. Give the whole program in one block that begins with ```python."
)
_STARTER = (
    "{question}\n\n"
    "Complete this Python 3 code, keeping its names:\n\n```python\n{starter}\n```\n\n"
    "Give the whole solution in one block that begins with ```python."
)


def messages(
    problem: Problem, form: PromptForm = "task", system: str | None = None
) -> tuple[tuple[str, str], ...]:
    """The conversation that asks `problem`, as (role, content) pairs.

    Raises:
        ValueError: a form that does not exist.

    Example:
        >>> messages(Problem("1", "What is 1 + 1?", "integer", "2"), "plain")
        (('user', 'What is 1 + 1?'),)
    """
    if form not in FORMS:
        raise ValueError(f"prompt form is {form!r}; it must be one of {', '.join(FORMS)}")
    asked = (("user", _content(problem, form)),)
    return asked if system is None else (("system", system), *asked)


def template(problem: Problem, form: PromptForm = "task") -> str:
    """The text around the question, with {question} where it goes."""
    if problem.kind == "choice":
        return _CHOICE  # without the options there is nothing to choose from
    if form == "plain":
        return "{question}"
    if problem.kind == "code":
        return _STARTER if starter_code(problem) else _STANDARD_INPUT
    return _BOXED


def starter_code(problem: Problem) -> str:
    """The code that a solution has to complete; "" if it is a whole program."""
    if not problem.tests:
        return ""
    return str(json.loads(problem.tests).get("starter_code") or "").strip("\n")


def _content(problem: Problem, form: PromptForm) -> str:
    options = "\n".join(
        f"{letter}) {choice}" for letter, choice in zip(LETTERS, problem.choices, strict=False)
    )
    starter = starter_code(problem) if problem.kind == "code" else ""
    parts = {"question": problem.question.strip(), "options": options, "starter": starter}
    # In one pass: what a question says in braces is its own.
    return _SLOT.sub(lambda slot: parts[slot[1]], template(problem, form))
