"""Perplexity of one long text under a model, with its protocol stated.

The text is tokenised whole, as the tokenizer does it by default (a tokenizer that begins texts with
a special token adds it once). Windows of `context` tokens start every `stride` tokens; a token is
scored in the first window that holds it and a token before it, so exactly once. With
stride = context, windows do not overlap and the first token of each is not scored: the usual
protocol of quantisation papers (WikiText-2, 2,048). With a smaller stride every token but the very
first is scored, behind at least context - stride others unless the text begins nearer.

Knows token ids and models, not files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reset.analyze.measure import score_tokens


@dataclass(frozen=True)
class Window:
    """Tokens `begin` .. `end` - 1 go through the model, those from `first` on are scored."""

    begin: int
    first: int
    end: int


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-probability per token, and what it was taken over."""

    perplexity: float
    mean_nll_nats: float
    tokens: int
    windows: int


def windows(length: int, context: int, stride: int) -> Iterator[Window]:
    """How a text of `length` tokens is cut.

    Raises:
        ValueError: unless 1 <= stride <= context and context >= 2.

    Example:
        >>> list(windows(5, 3, 3))
        [Window(begin=0, first=1, end=3), Window(begin=3, first=4, end=5)]
    """
    if context < 2 or not 1 <= stride <= context:
        raise ValueError(
            f"context is {context} and stride {stride}; need context >= 2 and "
            "1 <= stride <= context"
        )
    scored = 0  # tokens before this one had their turn
    for begin in range(0, length, stride):
        end = min(begin + context, length)
        first = max(scored, begin + 1)
        if first < end:
            yield Window(begin, first, end)
        scored = end
        if end == length:
            return


def perplexity(
    model: Any,
    ids: Sequence[int],
    *,
    context: int,
    stride: int,
    advance: Callable[[int], None] = lambda done: None,
) -> Perplexity:
    """Perplexity of a token sequence.

    Args:
        model: a causal language model of transformers.
        ids: the whole text, at least two tokens.
        context: tokens a window, at most what the model was made for.
        stride: tokens between the beginnings of two windows.
        advance: called with how many windows are done.

    Raises:
        ValueError: as `windows` and `score_tokens`; fewer than two tokens.
    """
    cuts = list(windows(len(ids), context, stride))
    if not cuts:
        raise ValueError(f"the text has {len(ids)} tokens, need at least 2")
    total, count = 0.0, 0
    for done, window in enumerate(cuts, start=1):
        prompt, scored = ids[window.begin : window.first], ids[window.first : window.end]
        scores = score_tokens(model, prompt, scored)
        total -= float(scores.logprob_nats.sum(dtype=np.float64))
        count += len(scored)
        advance(done)
    return Perplexity(math.exp(total / count), total / count, count, len(cuts))
