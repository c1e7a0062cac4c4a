"""Prompt forms: what is asked, and that it is kept."""

import json

import pytest

from reset.evaluate.problems import Problem
from reset.evaluate.prompts import messages, template

CHOICE = Problem("c", "Which is it?", "choice", "B", choices=("red {x}", "blue"))


def test_braces_of_a_question_are_its_own():
    ((_, text),) = messages(Problem("1", "Is {options} {question} {}?", "maths", "1"))
    assert text.startswith("Is {options} {question} {}?\n")


def code(starter):
    tests = json.dumps({"starter_code": starter, "public_test_cases": "[]"})
    return Problem("k", "Add {them}.", "code", "", tests=tests)


def test_h9_maths_asks_for_the_box_that_the_grader_looks_for():
    ((role, text),) = messages(Problem("1", " What is $\\frac{1}{2}$? ", "maths", "1/2"))
    assert role == "user"
    assert text.startswith("What is $\\frac{1}{2}$?\n\n")
    assert "\\boxed{}" in text


def test_h9_choices_come_with_letters_in_either_form():
    for form in ("task", "plain"):
        ((_, text),) = messages(CHOICE, form)
        assert "A) red {x}\nB) blue" in text
        assert "'Answer: X'" in text


def test_code_problems_ask_for_a_program_or_to_complete_the_starter():
    ((_, program),) = messages(code(""))
    assert "standard input" in program
    ((_, solution),) = messages(code("class Solution:\n    def add(self): {}"))
    assert "```python\nclass Solution:\n    def add(self): {}\n```" in solution
    assert "standard input" not in solution


def test_plain_is_the_question_alone_and_a_system_prompt_comes_first():
    problem = Problem("1", "What?", "integer", "2")
    assert messages(problem, "plain", "Be brief.") == (("system", "Be brief."), ("user", "What?"))
    assert template(problem, "plain") == "{question}"


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="prompt form is 'cot'"):
        messages(CHOICE, "cot")
