"""Entropy, log-probability and rank of given tokens under a model, a few hundred at a time.

A sequence goes through the model in chunks that share its KV cache, and the logits of a chunk are
reduced a few rows at a time, so that tokens x vocabulary never exists. Beyond the weights, the KV
cache and one chunk's activations this takes about `LOGITS_BYTES` + `ROWS_BYTES` at most, however
long the text.
Knows nothing of texts, steps or files.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from reset.entropy import entropy_nats

LOGITS_BYTES = 1 << 28
"""For the logits of a chunk."""

ROWS_BYTES = 1 << 26
"""For the rows that are being reduced."""

_MAX_CHUNK = 512  # more tokens at once make no GPU faster, but the attention of a chunk larger
# Per logit of the rows being reduced, at the worst moment, in `entropy_nats`: the float32 copy,
# the shifted logits, their exponentials, the products and those with masked ones replaced (4 bytes
# each), a mask (1), and what the allocator rounds up.
_BYTES_PER_LOGIT = 24


class TokenScores(NamedTuple):
    """Each [T], on the host."""

    entropy_nats: np.ndarray  # float32, H_t of the raw logits that the token was predicted by
    logprob_nats: np.ndarray  # float32, log-probability of the token under them
    rank: np.ndarray  # int32, how many tokens are likelier (of equals: those with lower ids)


class Chunks(NamedTuple):
    """How a sequence is cut."""

    tokens: int  # through the model at once
    rows: int  # reduced at once


def chunk_sizes(vocab_size: int, bytes_per_logit: int) -> Chunks:
    """The largest pieces that fit; at least one token.

    Example:
        >>> chunk_sizes(151_936, 2)
        Chunks(tokens=512, rows=18)
    """
    tokens = min(max(LOGITS_BYTES // (vocab_size * bytes_per_logit), 1), _MAX_CHUNK)
    rows = min(max(ROWS_BYTES // (vocab_size * _BYTES_PER_LOGIT), 1), tokens)
    return Chunks(tokens, rows)


@torch.no_grad()
def score_tokens(
    model: Any, prompt: Sequence[int], tokens: Sequence[int], *, chunks: Chunks | None = None
) -> TokenScores:
    """Scores `tokens` as the continuation of `prompt` (teacher forcing).

    Args:
        model: a causal language model of transformers.
        prompt: ids before the first token, at least one; they get no score.
        tokens: ids to score, at least one.
        chunks: how the sequence is cut; by default as `chunk_sizes` says.

    Raises:
        ValueError: prompt or tokens are empty, together longer than the model's context, an id is
            outside the vocabulary, or logits are NaN or infinite (the position is named).
    """
    sequence = _checked_sequence(model, prompt, tokens)
    if chunks is None:
        chunks = chunk_sizes(vocabulary_size(model), model.dtype.itemsize)
    # Made once: small results that live on between large freed blocks would keep the C library
    # from using those again, and the process would grow with the text.
    scores = TokenScores(
        np.empty(len(tokens), np.float32),
        np.empty(len(tokens), np.float32),
        np.empty(len(tokens), np.int32),
    )
    for start, logits in _logit_chunks(model, sequence[:-1], chunks.tokens):
        # Row i of the chunk predicts token start + i + 1 of the sequence.
        first = max(len(prompt) - 1 - start, 0)
        for row in range(first, logits.shape[0], chunks.rows):
            end = min(row + chunks.rows, logits.shape[0])
            targets = sequence[start + row + 1 : start + end + 1]
            place = slice(start + row + 1 - len(prompt), start + end + 1 - len(prompt))
            for column, values in zip(scores, score_rows(logits[row:end], targets), strict=True):
                column[place] = values.numpy()
        del logits  # before the next chunk's are made
    bad = np.flatnonzero(~np.isfinite(scores.entropy_nats))
    if bad.size:
        raise ValueError(
            f"the logits at output position {bad[0]} hold NaN or +inf; check the checkpoint "
            "(nvfp4r inspect) and the dtype: float16 overflows on models trained in bfloat16"
        )
    return scores


def score_rows(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy (float32), log-probability (float32) and rank (int32) of `targets`, on the host.

    Args:
        logits: [R, V] raw, before temperature and truncation.
        targets: [R] int64, ids of the tokens that followed.
    """
    entropy = entropy_nats(logits)
    wide = logits.float()
    target = targets.to(logits.device).unsqueeze(1)
    own = wide.gather(1, target)  # [R, 1]
    logprob = own.squeeze(1) - wide.logsumexp(1)
    likelier = (wide > own).sum(1, dtype=torch.int32)
    ids = torch.arange(wide.shape[1], device=wide.device)
    likelier += ((wide == own) & (ids < target)).sum(1, dtype=torch.int32)
    return entropy.cpu(), logprob.cpu(), likelier.cpu()


def vocabulary_size(model: Any) -> int:
    """Width of the model's logits."""
    return int(model.config.get_text_config().vocab_size)


def context_length(model: Any) -> int | None:
    """The most tokens that the model was made for, or None if its configuration does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _logit_chunks(model: Any, sequence: Tensor, tokens: int) -> Iterator[tuple[int, Tensor]]:
    """(index of the first token, logits [n, V]) of each chunk of `sequence`.

    Holds no chunk while it makes the next; torch.no_grad() as a decorator of a generator would.
    """
    # transformers 5 renamed the argument and the output on its way; both names are in use.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = None
    for start in range(0, len(sequence), tokens):
        ids = sequence[start : start + tokens].unsqueeze(0).to(model.device)
        result = model(input_ids=ids, use_cache=True, **{name: cache})
        cache, logits = result[name], result["logits"][0]
        del result
        if cache is None:  # the next chunk would not see this one
            raise ValueError(
                f"{type(model).__name__} returns no cache, so a text cannot go through it in "
                "chunks; is use_cache off in its config.json?"
            )
        yield start, logits
        del logits


def _checked_sequence(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    if len(prompt) == 0 or len(tokens) == 0:
        raise ValueError(
            f"{len(prompt)} prompt tokens and {len(tokens)} tokens to score; at least one of each "
            "is needed"
        )
    longest = context_length(model)
    length = len(prompt) + len(tokens)
    if longest is not None and length > longest:
        raise ValueError(
            f"{length} tokens, but the model was made for {longest}; use a shorter text"
        )
    sequence = torch.tensor([*prompt, *tokens], dtype=torch.int64)
    width = vocabulary_size(model)
    bad = ((sequence < 0) | (sequence >= width)).nonzero()
    if len(bad):
        position = int(bad[0])
        raise ValueError(
            f"token {int(sequence[position])} at position {position} is outside the model's "
            f"{width} ids; do the tokens belong to this model?"
        )
    return sequence
