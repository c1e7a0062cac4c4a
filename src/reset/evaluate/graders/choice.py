"""Multiple choice: which letter an answer settles on.

In order: the last box, the last "answer: X", a last line that is a letter alone. A letter that
merely stands somewhere in the text is no answer. Knows no task.
"""

from __future__ import annotations

import re
from string import ascii_uppercase

from reset.evaluate.graders.boxes import after_thinking, last_box
from reset.evaluate.graders.verdict import UNPARSED, Grade
from reset.evaluate.problems import Answer, Problem

_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathsf|mbox|bf|rm)(?![A-Za-z])"
)
# Every repetition is bounded: degenerate answers, of blanks say, must not take for ever.
_LETTER = r"(?P<letter>[A-Za-z])(?![A-Za-z0-9'’])"
_LEAD = r"[\s*_$(\[{]{0,8}(?:(?:option|choice)[\s*_]{1,8})?[\s*_$(\[{]{0,8}"
_COLON = re.compile(
    r"\banswer[\s*_]{0,8}(?:\bis\b)?[\s*_]{0,8}[:=]" + _LEAD + _LETTER, re.IGNORECASE
)
_IS = re.compile(
    r"\b(?:answer|(?:correct|best|right)\s{1,8}(?:option|choice))[\s*_]{1,8}is\b" + _LEAD + _LETTER,
    re.IGNORECASE,
)
_ANOTHER = re.compile(
    r"[\s*_$)\]}]{0,8}(?:,|/|&|\band\b|\bor\b)[\s*_$(\[{]{0,8}[A-Za-z](?![A-Za-z])"
)
_END = re.compile(r"[ \t*_$)\]}]{0,8}(?:$|[.,;:)\n]|\*\*)")
_LONE = re.compile(r"[\s*_$(\[{]{0,8}(?:(?:option|choice)\s{1,8})?([A-Z])[\s*_$)\]}.:]{0,8}")
_MOST = 10  # letters that are taken for options if the problem lists none


def grade_choice(answer: Answer, problem: Problem) -> Grade:
    """Whether `answer` settles on the letter `problem.answer`.

    Raises:
        ValueError: the right answer is not the letter of an option.
    """
    letters = ascii_uppercase[: len(problem.choices) or _MOST]
    if len(problem.answer) != 1 or problem.answer not in letters:
        raise ValueError(
            f"problem {problem.id}: the answer is {problem.answer!r}, need one letter of {letters}"
        )
    letter = chosen_letter(answer.text, letters, problem.choices)
    if letter is None:
        return UNPARSED
    return Grade(letter == problem.answer, letter, f"{letter}, right is {problem.answer}")


def chosen_letter(text: str, letters: str, choices: tuple[str, ...] = ()) -> str | None:
    """The letter of `letters` that `text` settles on, None if it settles on none.

    A box may also hold the words of one of `choices`. What stands behind `</think>` goes first.
    """
    for part in (after_thinking(text), text):
        found = (
            _boxed(part, letters, choices)
            or _stated(part, letters)
            or _alone(part, letters)
            or None
        )
        if found is not None:
            return found
    return None


def _boxed(text: str, letters: str, choices: tuple[str, ...]) -> str | None:
    box = last_box(text)
    if box is None:
        return None
    plain = _WRAPPER.sub("", box).replace("{", "").replace("}", "")
    match = re.match(
        r"[\s$(\[]*(?:(?:option|choice|answer)[\s:]+)?[\s$(\[]*" + _LETTER, plain, re.I
    )
    if match and not _ANOTHER.match(plain, match.end()):
        rest = plain[match.end() :]
        letter = match["letter"].upper()
        # "C", "(C)", "C. 42 nm" are letters; "C + 1" and "c t" are formulas
        if letter in letters and re.fullmatch(r"[\s$)\]]*(?:[.:)].*)?", rest, re.DOTALL):
            return letter
    same = [
        letters[i] for i, choice in enumerate(choices) if _words(choice) in (_words(box), plain)
    ]
    return same[0] if len(same) == 1 else None


def _stated(text: str, letters: str) -> str | None:
    """The last statement, of either form, that names a single option."""
    text = _WRAPPER.sub("", text)
    found = []
    for pattern in (_COLON, _IS):
        for match in pattern.finditer(text):
            letter = match["letter"]
            opened = text[match.start() : match.start("letter")].rstrip(" ")[-1:] in "([{*$"
            ends = _END.match(text, match.end()) is not None
            if letter.upper() not in letters or _ANOTHER.match(text, match.end()):
                continue
            if letter.islower() and not (opened or ends):
                continue  # "answer: a strange one"
            if letter in "AI" and pattern is _IS and not (opened or ends):
                continue  # "the answer is A student": an article, not an option
            found.append((match.start("letter"), letter.upper()))
    return max(found)[1] if found else None


def _alone(text: str, letters: str) -> str | None:
    lines = [line for line in text.splitlines() if line.strip()]
    match = _LONE.fullmatch(lines[-1]) if lines else None
    return match[1] if match and match[1] in letters else None


def _words(text: str) -> str:
    return re.sub(r"[\s$]+", "", text)
