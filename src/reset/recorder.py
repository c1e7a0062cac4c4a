"""Collects the numbers behind every token of a batch while it is decoded.

Keeps tensors on their device and moves nothing to the host until the traces are asked for. Knows
the trace record, not the engine that decodes.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reset.policy import Decision
from reset.steps import StepDetector
from reset.text import decode, token_pieces
from reset.trace.record import TokenTrace


class _Position(NamedTuple):
    """One output position of every row."""

    decision: Decision
    likeliest: Tensor  # [B, A] int64 ids, best first
    logprobs: Tensor  # [B, A] float32, of `likeliest` under the raw logits


class Recorder:
    """Records of one batch, in order of output position.

    Args:
        detector: finds the step borders again when the traces are made.
        alternatives: how many of the likeliest tokens are kept per position.
    """

    def __init__(self, detector: StepDetector, alternatives: int) -> None:
        self._detector = detector.to("cpu")
        self._alternatives = alternatives
        self._positions: list[_Position] = []
        self._drawn: list[Tensor] = []  # [B] float32 logprob of the token drawn at each position
        self._last = torch.empty(0)  # [B, V] logprobs of the last position

    def add(self, raw_logits: Tensor, decision: Decision) -> None:
        """Record one position: what the policy decided from `raw_logits` [B, V]."""
        self._last = torch.log_softmax(raw_logits.float(), dim=1)
        count = min(self._alternatives, raw_logits.shape[1])
        logprobs, likeliest = self._last.topk(count, dim=1)
        self._positions.append(_Position(decision, likeliest, logprobs))

    def drew(self, token: Tensor) -> None:
        """Record the token [B] that was drawn at the last position."""
        self._drawn.append(self._logprob(token))

    def entropies(self) -> Tensor:
        """[T, B] float64 on the host: H_t of every position and row, in nats."""
        return torch.stack([position.decision.entropy for position in self._positions]).cpu()

    def traces(
        self, outputs: Tensor, tokenizer: Any, lengths: list[int]
    ) -> list[tuple[TokenTrace, ...]]:
        """One trace a row.

        Args:
            outputs: [B, T] the output tokens.
            tokenizer: turns ids into text.
            lengths: how many tokens of each row count; the rest is padding.
        """
        drawn = [*self._drawn, self._logprob(outputs[:, len(self._positions) - 1])]
        logprobs = torch.stack(drawn[: len(self._positions)]).cpu()  # [T, B]
        kept = torch.stack([position.logprobs for position in self._positions]).exp().tolist()
        likeliest = torch.stack([position.likeliest for position in self._positions]).tolist()
        fields = torch.stack(  # [T, 5, B]
            [torch.stack([value.double() for value in p.decision]) for p in self._positions]
        ).cpu()
        traces = []
        for row, length in enumerate(lengths):
            others = [
                list(zip(likeliest[position][row], kept[position][row], strict=True))
                for position in range(length)
            ]
            traces.append(
                token_traces(
                    tokenizer,
                    self._detector,
                    outputs[row, :length].tolist(),
                    fields[:length, :, row].tolist(),
                    logprobs[:length, row].exp().tolist(),
                    others,
                )
            )
        return traces

    def _logprob(self, token: Tensor) -> Tensor:
        return self._last.gather(1, token.unsqueeze(1)).squeeze(1)


def token_traces(
    tokenizer: Any,
    detector: StepDetector,
    ids: list[int],
    decisions: list[list[float]],
    probabilities: list[float],
    alternatives: list[list[tuple[int, float]]],
) -> tuple[TokenTrace, ...]:
    """The trace of one text.

    Args:
        tokenizer: turns ids into text.
        detector: finds the step borders; on the CPU.
        ids: the output tokens.
        decisions: for each, the five numbers of its `Decision`.
        probabilities: for each, its probability under the raw logits.
        alternatives: for each, (id, probability) of the likeliest tokens.
    """
    text_of = lru_cache(maxsize=None)(lambda token: decode(tokenizer, [token]))
    state, step, tokens = detector.initial_state(1), 0, []
    for position, piece in enumerate(token_pieces(tokenizer, ids)):
        state, ended = detector.advance(state, torch.tensor([ids[position]]))
        temperature, threshold, *means = decisions[position]
        tokens.append(
            TokenTrace(
                position=position,
                token_id=ids[position],
                text=piece,
                entropy_nats=means[0],
                step_entropy_nats=means[1],
                mean_entropy_nats=means[2],
                threshold_nats=threshold if math.isfinite(threshold) else None,
                temperature=temperature,
                step=step,
                ends_step=bool(ended),
                probability=probabilities[position],
                alternatives=tuple((text_of(one), p) for one, p in alternatives[position]),
            )
        )
        step += bool(ended)
    return tuple(tokens)
