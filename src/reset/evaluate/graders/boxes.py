r"""Final answers in running text: `\boxed{...}`, `#### 42`, "the answer is 42".

A box counts only if its braces close, so that a box that was cut off, or that was opened and
forgotten, neither wins nor hides a later one. The last one wins: models correct themselves. Knows
nothing of what an answer means.
"""

from __future__ import annotations

import re

# Every repetition is bounded: degenerate answers, of blanks say, must not take for ever.
_BOX = re.compile(
    r"\\(?:boxed|fbox|framebox)\s{0,8}(?:(?P<open>\{)|(?P<bare>[0-9]{1,100}|[A-Za-z](?![A-Za-z])))"
)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_HASHES = re.compile(r"^[ \t]{0,8}####[ \t]{0,8}(\S[^\n]{0,300})$", re.MULTILINE)
_PHRASE = re.compile(
    r"\banswer\b[*_]{0,3}(?:\s{1,8}is\b[*_]{0,3}\s{0,8}:?|\s{0,8}[:=])[*_]{0,3}\s{0,8}"
    r"(?P<said>[^\n]{0,100}?[^\s.])(?=[*_]{0,3}\.?[*_]{0,3}(?:[ \t]{0,8}$|\.\s))",
    re.IGNORECASE | re.MULTILINE,
)
_EMPHASIS = "*_ \t"


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; all of `text` if there is none."""
    return text.rpartition("</think>")[2]


def last_box(text: str) -> str | None:
    """The content of the last box of `text` that closes and is not empty, else None."""
    closing = _closing_braces(text)
    for match in reversed(list(_BOX.finditer(text))):
        content = match["bare"]
        if match["open"] and match.start("open") in closing:
            content = text[match.end() : closing[match.start("open")]]
        if content and content.strip():
            return content.strip()
    return None


def last_statement(text: str) -> str | None:
    """The last `#### X`, else the last "answer is X" or "Answer: X" up to the end of the sentence.

    None if there is neither.
    """
    for pattern in (_HASHES, _PHRASE):
        found = pattern.findall(text)
        if found:
            return str(found[-1]).strip(_EMPHASIS) or None
    return None


def final_answer(text: str) -> str | None:
    """The last box, else the last statement; behind the thinking first, else anywhere."""
    for part in (after_thinking(text), text):
        found = last_box(part) or last_statement(part)
        if found is not None:
            return found
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """Where each brace that is closed is closed; an escaped brace opens and closes nothing."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing
