"""What is asked and what came back: the two records that tasks, engines and graders share.

Knows no task, no engine and no rule of grading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["maths", "integer", "choice", "code", "target"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Problem:
    """One problem of a task.

    `answer` is the right answer: an expression ("maths"), an integer ("integer"), a letter
    ("choice"), the numbers and the target as `graders.target.target_answer` writes them ("target"),
    or "" ("code", which is judged by `tests`). `choices` are the options in the order
    of their letters. `tests` is a JSON object of the strings that LiveCodeBench has in a row, not
    decoded: public_test_cases, private_test_cases, metadata, starter_code.
    """

    id: str
    question: str
    kind: Kind
    answer: str
    choices: tuple[str, ...] = ()
    tests: str = ""
    source: str = ""


@dataclass(frozen=True)
class Answer:
    """What a model said: `finish_reason` is "length" if the token limit cut it off."""

    text: str
    finish_reason: FinishReason
    tokens: int
