"""Whether sampled text holds together to its end: the check of a checkpoint before any score.

A damaged model may be coherent when greedy and fall apart slowly when sampled, so what counts is
the last third of long answers, at several temperatures. Knows texts alone, in no language in
particular.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reset.evaluate.problems import Answer
from reset.evaluate.text_checks import (
    DEGENERATE_LIMIT,
    LOOPING,
    is_degenerate,
    repetition_rate,
)

LOOPING_LIMIT = 0.25
"""More answers than this in a loop at their end is a fault; single ones happen to sound models."""

ODD_LIMIT = 0.05
"""More odd words than this; ordinary prose, LaTeX and code have below 1 %."""

LONG = 400
"""Tokens an answer needs for a slow collapse to show."""

_WORD = re.compile(r"[^\W\d_]+|\ufffd+")
_LONGEST_WORD = 40
_FEWEST_LETTERS = 6  # without a vowel; shorter ones are names and abbreviations
_VOWELS = frozenset("aeiouy")
# Scripts that separate words: two of them in one word is no word. Others stand beside letters of
# any script, and Greek ones do in formulas.
_ALPHABETS = frozenset(
    ("LATIN", "CYRILLIC", "ARABIC", "HEBREW", "ARMENIAN", "GEORGIAN", "DEVANAGARI", "BENGALI")
)


@dataclass(frozen=True)
class Soundness:
    """Shares 0 .. 1 over the answers of one arm; `faults` says in words what is wrong.

    `repetition_rate` and `odd_words` are of the last third of each answer, `looping` of it or all.
    """

    answers: int
    tokens_per_answer: float
    truncated: float
    degenerate: float
    repetition_rate: float
    looping: float
    odd_words: float
    faults: tuple[str, ...]

    @property
    def is_long(self) -> bool:
        """Whether the answers were long enough for a slow collapse to show."""
        return self.tokens_per_answer >= LONG


def soundness(answers: Sequence[Answer], *, is_greedy: bool = False) -> Soundness:
    """What the answers of one arm look like.

    Args:
        answers: all of one arm.
        is_greedy: many sound models fall into loops when greedy, so there a loop is no fault.

    Raises:
        ValueError: no answers.
    """
    if not answers:
        raise ValueError("no answers to look at; pass at least one")
    ends = [last_third(answer.text) for answer in answers]
    repetition = [repetition_rate(end) for end in ends]
    degenerate = float(
        np.mean(
            [
                is_degenerate(answer.text) or is_degenerate(end)
                for answer, end in zip(answers, ends, strict=True)
            ]
        )
    )
    whole = [repetition_rate(answer.text) for answer in answers]  # sees loops of long rounds
    looping = float(np.mean([max(pair) > LOOPING for pair in zip(repetition, whole, strict=True)]))
    odd = odd_word_share(" ".join(ends))
    told = (
        (degenerate > DEGENERATE_LIMIT, f"{degenerate:.0%} of the answers are blank or one token"),
        (
            looping > LOOPING_LIMIT and not is_greedy,
            f"{looping:.0%} of the answers are caught in a loop",
        ),
        (odd > ODD_LIMIT, f"{odd:.0%} of the words at the end are no words"),
    )
    return Soundness(
        answers=len(answers),
        tokens_per_answer=float(np.mean([answer.tokens for answer in answers])),
        truncated=float(np.mean([answer.finish_reason == "length" for answer in answers])),
        degenerate=degenerate,
        repetition_rate=float(np.mean(repetition)),
        looping=looping,
        odd_words=odd,
        faults=tuple(text for is_fault, text in told if is_fault),
    )


def last_third(text: str) -> str:
    """The last third of the words, where a text of three words or more has one."""
    starts = [word.start() for word in re.finditer(r"\S+", text)]
    return text[starts[2 * len(starts) // 3] :] if len(starts) >= 3 else text


def odd_word_share(text: str) -> float:
    """Share of the words that no language writes, 0 .. 1; 0 for a text without words.

    Odd are characters that could not be decoded, words of more than 40 letters, words that mix
    alphabets, and six or more Latin letters without a vowel. Nonsense made of ordinary words is
    not seen here.

    Example:
        >>> odd_word_share("the cat sat on the mat"), odd_word_share("thе rsтuv xkcdqwrt")
        (0.0, 1.0)
    """
    words = _WORD.findall(text)
    return sum(map(_is_odd, words)) / len(words) if words else 0.0


def _is_odd(word: str) -> bool:
    if "\ufffd" in word:
        return True
    scripts = {unicodedata.name(letter, "?").split()[0] for letter in word}
    if len(scripts & _ALPHABETS) > 1:
        return True
    if scripts & _ALPHABETS and len(word) > _LONGEST_WORD:
        return True
    plain = unicodedata.normalize("NFD", word).lower()
    return scripts == {"LATIN"} and len(word) >= _FEWEST_LETTERS and not _VOWELS & set(plain)
