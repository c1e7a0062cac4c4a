"""What can be seen of an answer without knowing the right one: blank, stuck, or repeating itself.

Knows texts alone, since a server gives nothing else.
"""

from __future__ import annotations

import re
from collections import Counter

_PIECE = re.compile(r"<\|?\w+\|?>|\w+|[^\w\s]")  # <pad> and <|end|> are one piece
_FEWEST_PIECES = 16
_SPAN = 8

DEGENERATE_LIMIT = 0.05
"""A larger share of degenerate answers than this says that the set-up is broken, not the model."""


LOOPING = 0.5
"""An answer whose repetition rate is above this is caught in a loop."""


def is_degenerate(text: str) -> bool:
    """True if an answer is blank, or more than half of it is one word or one sign.

    Answers of fewer than 16 pieces are only judged by being blank: "18" is an answer.

    Example:
        >>> is_degenerate("!" * 100), is_degenerate("The answer is 18."), is_degenerate(" ")
        (True, False, True)
    """
    pieces = _PIECE.findall(text)
    if not pieces:
        return True
    return len(pieces) >= _FEWEST_PIECES and 2 * Counter(pieces).most_common(1)[0][1] > len(pieces)


def repetition_rate(text: str) -> float:
    """Share of the spans of eight words that were there before in the same text, 0 .. 1.

    Near 0 for ordinary text; near 1 for one that is caught in a loop.

    Example:
        >>> repetition_rate("wait, let me check that once more " * 50) > 0.9
        True
    """
    words = text.split()
    spans = [tuple(words[start : start + _SPAN]) for start in range(len(words) - _SPAN + 1)]
    return 1 - len(set(spans)) / len(spans) if spans else 0.0
