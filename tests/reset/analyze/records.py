"""Answers and dumps with numbers of one's choice, for the studies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reset.analyze.dump import AnswerRecord, Dump, step_indices

SETTINGS: dict[str, Any] = {
    "model": "m",
    "model_sha256": "0" * 64,
    "quantisation": {"format": "none"},
    "dtype": "float32",
    "mode": "forced",
    "policy": None,
    "data": "d.jsonl",
}
MADE_WITH = {"device": "cpu", "versions": {"torch": "2"}}


def answer(
    entropies: Sequence[float] | np.ndarray,
    last_of_step: Sequence[int] = (),
    tokens: Sequence[int] | None = None,
    **others: Any,
) -> AnswerRecord:
    """An answer of these entropies, in nats; `last_of_step` are positions that end a step."""
    count = len(entropies)
    ends_step = np.zeros(count, dtype=np.bool_)
    ends_step[list(last_of_step)] = True
    ids = np.arange(count) if tokens is None else np.array(tokens)
    fields: dict[str, Any] = {
        "prompt_ids": np.array([7], dtype=np.int32),
        "token_id": ids.astype(np.int32),
        "entropy_nats": np.asarray(entropies, dtype=np.float32),
        "logprob_nats": np.full(count, -1.0, dtype=np.float32),
        "rank": np.zeros(count, dtype=np.int32),
        "step": step_indices(ends_step),
        "ends_step": ends_step,
        "finish_reason": "given",
    }
    return AnswerRecord(**{**fields, **others})


def dump_of(folder: Path, answers: Sequence[AnswerRecord], **settings: Any) -> Dump:
    """A complete dump of these answers."""
    digests = [str(index) for index in range(len(answers))]
    made = Dump.start(folder, {**SETTINGS, "texts_sha256": digests, **settings}, MADE_WITH)
    for index, one in enumerate(answers):
        made.write(index, one)
    return made


def random_answers(
    seed: int, lengths: Sequence[int], share_of_ends: float = 0.05
) -> list[AnswerRecord]:
    """Entropies as reasoning models have them: most near 0, some of several nats."""
    generator = np.random.default_rng(seed)
    answers = []
    for length in lengths:
        entropies = generator.exponential(0.5, length) * (generator.random(length) < 0.6)
        ends = np.flatnonzero(generator.random(length) < share_of_ends)
        answers.append(answer(entropies, ends.tolist()))
    return answers
