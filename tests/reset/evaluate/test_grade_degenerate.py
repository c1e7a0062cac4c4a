"""Answers that went wrong at length are graded in seconds, whatever they repeat."""

from __future__ import annotations

import time

import pytest

from reset.evaluate.graders.boxes import final_answer
from reset.evaluate.graders.choice import chosen_letter
from reset.evaluate.graders.code import extract_code, same_lines

LENGTH = 30_000  # quadratic time would take a minute
UNITS = (
    *(" ", "\t", "\n", "*", "_", "$", "{", "}", "(", "`", "~", "#", "\\", "9", "A", "answer is "),
    *(
        "answer: ",
        "answer",
        "the answer is the ",
        "\\boxed{",
        "\\boxed",
        "\\boxed{{}",
        "```",
        "~~~",
    ),
    *("```python ", "```\n", "#### ", "\n#### x ", "**answer** : ", "option ", "Answer: A, ", "= "),
    *("correct option is ", "answer...", "answer is ....... ", "\\boxed{A", "a_", "x=", "\\text{"),
)


@pytest.mark.parametrize("unit", UNITS, ids=repr)
@pytest.mark.parametrize("frame", ["{}", "The answer is {}", "Answer: {}.", "#### 1{}2", "~~~{}`"])
def test_any_repetition_takes_a_moment(unit, frame):
    text = frame.replace("{}", unit * (LENGTH // len(unit)))
    started = time.process_time()
    final_answer(text)
    chosen_letter(text, "ABCD")
    extract_code(text)
    assert time.process_time() - started < 2


@pytest.mark.parametrize("end", ["", "x", ".", "e", "1.x"])
def test_long_numbers_are_compared_in_a_moment(end):
    started = time.process_time()
    same_lines("9" * LENGTH + end, "8" * LENGTH + end)
    assert time.process_time() - started < 2
