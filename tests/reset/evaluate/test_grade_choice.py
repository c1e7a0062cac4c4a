"""Multiple choice: which letter an answer settles on."""

from __future__ import annotations

import pytest

from reset.evaluate.graders.choice import chosen_letter, grade_choice
from reset.evaluate.problems import Answer, Problem

CHOICES = ("1 nm", r"42\text{ nm}", "3 eV", "4 eV")


def letter(text):
    return chosen_letter(text, "ABCD", CHOICES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Answer: B\n\nThis answer Depends on the sign", "B"),
        ("Answer: b", "B"),
        ("A student walks in. It all depends on Day and Cost.", None),
    ],
)
def test_h6_a_letter_in_passing_is_no_answer(text, expected):
    assert letter(text) == expected


def test_h6_a_box_beats_every_letter_behind_it():
    assert letter("So \\boxed{C}.\n\nA. wrong\nB. wrong\nAnswer: D\n\nA") == "C"


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{C}",
        r"\boxed{\text{C}}",
        r"\boxed{\mathbf{(C)}}",
        r"\boxed{C. 3 eV}",
        r"\boxed{\text{Option C}}",
        r"\boxed{3\ eV}".replace("\\ ", " "),
        "**Answer: C**",
        "**Answer:** (C)",
        "ANSWER: C",
        "Answer: C because of the spin",
        "Answer: Option C",
        "Answer:\n\nC",
        r"Answer: $\mathrm{C}$",
        "answer is (c)",
        "The correct answer is **C**.",
        "The correct option is C",
        "The answer is C) 3 eV",
        "Answer: B. No, wait.\nAnswer: C",
        "The answer is B. Hmm. So the answer is: C",
        "(C)",
        "It follows that\n**C**\n",
        "I say the answer is D.</think>Answer: C",
        "I say \\boxed{C}</think>Done.",
    ],
)
def test_ways_to_say_c(text):
    assert letter(text) == "C"


@pytest.mark.parametrize(
    "text",
    [
        *("", "The answer is A student of mine", "answer: a strange one", "Answer: E"),
        *("Answer: A and B", "Answer: A, C", r"\boxed{A, B}", r"\boxed{c t}", r"\boxed{C + 1}"),
        *("The answer is not C", "Answer: I don't know", "Option C is wrong", r"\boxed{C"),
        *("The answer choices are A, B, C and D.", "Answer: Because", r"\boxed{}", "Answer: C4"),
    ],
)
def test_no_answer(text):
    assert letter(text) is None


def test_the_words_of_an_option_in_a_box_name_it():
    assert letter(r"\boxed{42\text{ nm}}") == "B"


def test_a_grade():
    problem = Problem("gpqa-1", "Which?", "choice", "C", choices=CHOICES)
    grades = [
        grade_choice(Answer(text, "stop", 5), problem) for text in ("Answer: C", "Answer: D", "C?")
    ]
    assert [(g.correct, g.extracted) for g in grades] == [(True, "C"), (False, "D"), (False, None)]


@pytest.mark.parametrize("right", ["E", "", "AB", "3 eV"])
def test_the_right_answer_must_be_an_option(right):
    problem = Problem("gpqa-1", "Which?", "choice", right, choices=CHOICES)
    with pytest.raises(
        ValueError, match=r"problem gpqa-1: the answer is .* need one letter of ABCD"
    ):
        grade_choice(Answer("Answer: A", "stop", 5), problem)
