"""Blank, stuck and repeating answers."""

import pytest

from reset.evaluate.text_checks import is_degenerate, repetition_rate


@pytest.mark.parametrize(
    "text",
    [
        *("", " \n ", "!" * 200, "the " * 40, "0" + " 0" * 60, "ok " + "<pad> " * 400),
        "a b c " + "! " * 40,
        "<|end|>" * 30,
    ],
)
def test_h10_output_of_a_broken_model_is_degenerate(text):
    assert is_degenerate(text)


@pytest.mark.parametrize(
    "text",
    [
        *("18", "yes yes yes", "B", r"\boxed{7}", "答案是四十二。"),
        r"We have $\frac{1}{2} + \frac{1}{3} = \frac{5}{6}$, so $\boxed{\frac{5}{6}}$ is right.",
        "wait, let me check that again. " * 50,  # a loop, but a text
        " ".join(str(number) for number in range(100)),
    ],
)
def test_texts_are_not(text):
    assert not is_degenerate(text)


def test_the_border_is_one_half():
    assert not is_degenerate("x y " * 20)
    assert is_degenerate("x y " * 20 + "x")


def test_repetition_counts_spans_that_were_there_before():
    assert repetition_rate("") == repetition_rate("one two three") == 0.0
    words = " ".join(map(str, range(20)))
    assert repetition_rate(words) == 0.0
    # 40 words hold 33 spans; those of the second half that lie in it, 13, were there before.
    assert repetition_rate(f"{words} {words}") == pytest.approx(13 / 33)
