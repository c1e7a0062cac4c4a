"""Mathematical answers: what is taken for the answer, and what equals what."""

from __future__ import annotations

import sys
import threading
from fractions import Fraction

import pytest

from reset.evaluate.graders import maths
from reset.evaluate.graders.boxes import final_answer, last_box
from reset.evaluate.graders.maths import MathsGrader, plain_number
from reset.evaluate.problems import Answer, Problem


@pytest.fixture(scope="module")
def grader():
    with MathsGrader() as grader:
        yield grader


def grade(grader, text, right="42", kind="integer"):
    problem = Problem("aime-7", "What is it?", kind, right)
    return grader.grade(Answer(text, "stop", tokens=9), problem)


# ---- what is taken for the answer ----------------------------------------------------------------


def test_h1_a_box_ends_at_its_own_brace():
    assert last_box(r"So $\boxed{\frac{1}{2}}$ it is.") == r"\frac{1}{2}"
    assert last_box(r"\boxed{\left\{1, 2\right\}}") == r"\left\{1, 2\right\}"


def test_h1_brackets_in_a_text_font_do_not_crash(grader):
    verdict = grade(grader, r"\boxed{\text{(}42\text{)}}")
    assert verdict.extracted == r"\text{(}42\text{)}"
    assert verdict.correct


def test_h2_the_last_box_wins(grader):
    verdict = grade(grader, r"I get \boxed{2} no, \boxed{3}", right="3")
    assert (verdict.correct, verdict.extracted) == (True, "3")


@pytest.mark.parametrize(("said", "right"), [("033", "33"), ("33", "033"), ("16", "016")])
def test_h3_leading_zeros_change_nothing(grader, said, right):
    assert grade(grader, rf"\boxed{{{said}}}", right).correct


def test_h4_a_box_that_never_closes_is_passed_over(grader):
    verdict = grade(grader, r"\boxed{x ... then \boxed{42}. Checked 3 cases")
    assert (verdict.correct, verdict.extracted) == (True, "42")


@pytest.mark.parametrize(
    "text", [r"\boxed{x ... checked 3 cases", "We count 42.", "", r"\boxed{ }"]
)
def test_h4_no_answer_is_unparsed_not_the_last_number(grader, text):
    verdict = grade(grader, text)
    assert (verdict.correct, verdict.extracted) == (False, None)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\fbox{42}", "42"),
        (r"$\boxed 42$", "42"),
        (r"\boxed {42}", "42"),
        ("9 + 9 = 18\n#### 18", "18"),
        ("The answer is 42.", "42"),
        ("**The final answer is: 42**", "42"),
        ("**Answer:** $42$", "$42$"),
        ("The answer is 3.5.", "3.5"),
        ("The answer is 7. Wait. The answer is 8.", "8"),
        (r"\boxed{42} and the answer is 7", "42"),
        (r"try \boxed{7}</think> It is \boxed{42}.", "42"),
        (r"so \boxed{42}</think> Done.", "42"),
        (r"the answer is 7</think> so \boxed{42}", "42"),
        (r"\boxed{42}</think> The answer is 43.", "43"),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


# ---- what equals what ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("box", "right"),
    [
        ("n=42", "42"),
        (r"42^\circ", "42"),
        (r"42^{\circ}", "42"),
        ("1{,}234", "1234"),
        ("1,234", "1234"),
        (r"1\,234", "1234"),
        (r"\textbf{42}", "42"),
        (r"42\text{ cm}", "42"),
        (r"42\text{ cm}^2", "42"),
        (r"42\,\mathrm{cm}^{3}", "42"),
        (r"\text{42}", "42"),
        (r"m + n = 42", "42"),
        (r"x_1 = 42.", "42"),
        ("42.0", "42"),
        (r"\$42", "42"),
        ("+42", "42"),
        ("−42", "-42"),
        (r"\left(42\right)", "42"),
    ],
)
def test_r3_a_dressed_integer_is_the_integer(grader, box, right):
    verdict = grade(grader, rf"\boxed{{{box}}}", right)
    assert verdict.correct
    assert "math-verify" not in verdict.detail, "the thin rule settles these"


def test_r3_an_fbox_is_a_box(grader):
    assert grade(grader, r"\fbox{42}").correct


@pytest.mark.parametrize(
    "box",
    [
        *("41", "-42", "420", "42.5", "4 2", "42x", "42, 43", r"42 \text{ or } 43", "42!"),
        *(r"42\text{ cm} + 1", r"4^{2}", r"42^2", r"42\,43", "x = 1, y = 42", r"\frac{42}{43}"),
        *(r"\text{no solution}", "n", "4242"),
    ],
)
def test_other_answers_are_wrong(grader, box):
    verdict = grade(grader, rf"\boxed{{{box}}}")
    assert (verdict.correct, verdict.extracted) == (False, box)


@pytest.mark.parametrize("box", [r"\frac{84}{2}", r"6 \cdot 7", "2^5 + 10", r"\sqrt{1764}"])
def test_an_expression_may_equal_an_integer(grader, box):
    verdict = grade(grader, rf"\boxed{{{box}}}")
    assert (verdict.correct, verdict.detail) == (True, "math-verify: equal")


@pytest.mark.parametrize(
    ("box", "right", "correct"),
    [
        (r"\frac12", "0.5", True),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        (r"(1, 2]", r"(1,2]", True),
        (r"(1, 2)", r"(1,2]", False),
        (r"\{3, 1, 2\}", r"\{1,2,3\}", True),
        (r"(x+1)^2", r"x^2+2x+1", True),
        (r"x^2+1", r"x^2+2x+1", False),
        ("18.00", "18", True),
        ("0.333", r"\frac{1}{3}", False),
        (r"\$1,080", "1080", True),
    ],
)
def test_expressions(grader, box, right, correct):
    assert grade(grader, rf"\boxed{{{box}}}", right, "maths").correct is correct


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,23", None),
        ("1,234,567", Fraction(1234567)),
        ("12,345.50", Fraction(24691, 2)),
        ("1,2345", None),
        (r"42\%", None),
        ("0x2a", None),
        ("４２", None),
        ("-.5", None),
        ("9" * 101, None),
    ],
)
def test_plain_number(text, number):
    assert plain_number(text) == number


# ---- what may go wrong ---------------------------------------------------------------------------


def test_an_integer_problem_needs_an_integer(grader):
    with pytest.raises(ValueError, match="aime-7: the answer is '080 or 081', no integer"):
        grade(grader, r"\boxed{80}", "080 or 081")


def test_a_runaway_box_is_not_evaluated(grader):
    verdict = grade(grader, rf"\boxed{{{'1+' * 2000}1}}")
    assert (verdict.correct, verdict.detail) == (False, "longer than 2000 characters")


def test_an_evaluation_without_end_is_not_equal_and_the_next_one_works(monkeypatch):
    monkeypatch.setattr(maths, "_SECONDS", 0.5)
    with MathsGrader() as grader:
        grader._start()
        verdict = grade(grader, r"\boxed{9^{9^9}}")
        assert (verdict.correct, "too long" in verdict.detail) == (False, True)
        monkeypatch.setattr(maths, "_SECONDS", 20.0)
        assert grade(grader, r"\boxed{\frac{84}{2}}").correct


def test_works_from_threads(grader):
    verdicts = []
    threads = [
        threading.Thread(
            target=lambda n=n: verdicts.append(
                grade(grader, rf"\boxed{{\frac{{{2 * n}}}{{2}}}}", f"{n}")
            )
        )
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [verdict.correct for verdict in verdicts] == [True] * 8


def test_a_missing_math_verify_is_an_error_not_a_wrong_answer(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with (
        MathsGrader() as grader,
        pytest.raises(ImportError, match=r"pip install 'reset-decoding\[eval\]'"),
    ):
        grade(grader, r"\boxed{\frac{84}{2}}")
