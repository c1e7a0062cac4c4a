"""From samples to a score: what is reported beside the mean, and when there is no score at all.

Knows samples as the store keeps them; knows no engine and draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from reset.evaluate.stats import Estimate, score_estimate
from reset.evaluate.text_checks import (
    DEGENERATE_LIMIT,
    LOOPING,
    is_degenerate,
    repetition_rate,
)


@dataclass(frozen=True)
class Report:
    """Scores are shares, 0 .. 1.

    `score` is the mean over problems of the mean over their samples, with its interval over
    problems; `seed_means` is the score of each sample number alone, `seed_deviation` their standard
    deviation (NaN for one). `score_completed` leaves truncated answers out (None if all are).
    `correct` lists, for each problem, what each of its samples was.
    """

    score: Estimate
    seed_means: tuple[float, ...]
    seed_deviation: float
    truncated: float
    score_completed: float | None
    unparsed: float
    degenerate: float
    repetition_rate: float
    looping: float
    tokens_per_answer: float
    correct: dict[str, list[bool]]

    @property
    def problems(self) -> int:
        return len(self.correct)

    @property
    def samples(self) -> int:
        return sum(map(len, self.correct.values()))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what is not known is null."""
        plain: dict[str, Any] = asdict(self)
        plain["score"] = {name: _known(value) for name, value in plain["score"].items()}
        plain["seed_deviation"] = _known(self.seed_deviation)
        return {"problems": self.problems, "samples": self.samples, **plain}


class DegenerateOutputError(ValueError):
    """The answers are no text of a working model, so a score would say nothing about it."""


def make_report(
    samples: Sequence[dict[str, Any]], problem_ids: Sequence[str], n_samples: int
) -> Report:
    """The report of a complete run.

    Args:
        samples: as the store keeps them, in any order.
        problem_ids: in the order of the task.
        n_samples: of each problem.

    Raises:
        ValueError: samples are missing.
        DegenerateOutputError: more than 5 % of the answers are blank or one token over and over.
    """
    found = {(sample["problem_id"], sample["sample"]): sample for sample in samples}
    wanted = [(name, number) for name in problem_ids for number in range(n_samples)]
    missing = sum(key not in found for key in wanted)
    if missing:
        raise ValueError(
            f"{missing} of {len(wanted)} samples are missing; a score of some of them would favour "
            "short answers. Go on with --resume"
        )
    ordered = [found[key] for key in wanted]
    refuse_degenerate(ordered, DEGENERATE_LIMIT)
    correct = np.array([sample["correct"] for sample in ordered], dtype=np.float64)
    by_problem = correct.reshape(len(problem_ids), n_samples)  # [P, n]
    seed_means = by_problem.mean(axis=0)
    completed = [sample["correct"] for sample in ordered if sample["finish_reason"] == "stop"]
    repetition = [repetition_rate(sample["text"]) for sample in ordered]
    return Report(
        score=score_estimate(by_problem.mean(axis=1)),
        seed_means=tuple(seed_means.tolist()),
        seed_deviation=float(seed_means.std(ddof=1)) if n_samples > 1 else float("nan"),
        truncated=1 - len(completed) / len(ordered),
        score_completed=_share(completed) if completed else None,
        unparsed=_share([sample["extracted"] is None for sample in ordered]),
        degenerate=_share([is_degenerate(sample["text"]) for sample in ordered]),
        repetition_rate=float(np.mean(repetition)),
        looping=_share([rate > LOOPING for rate in repetition]),
        tokens_per_answer=float(np.mean([sample["tokens"] for sample in ordered])),
        correct={
            name: [bool(value) for value in row]
            for name, row in zip(problem_ids, by_problem, strict=True)
        },
    )


def refuse_degenerate(samples: Sequence[dict[str, Any]], limit: float) -> None:
    """Raises DegenerateOutputError if more than this share of the answers is degenerate."""
    if _share([is_degenerate(sample["text"]) for sample in samples]) > limit:
        raise DegenerateOutputError(_degenerate_message(samples))


def speed(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Tokens a second over the time in which anything was being decoded.

    Each sample says when it came and how long its session had been decoding by then, so that the
    time between a kill and going on does not count.
    """
    spans = sorted((one["at"] - one["session_seconds"], one["at"]) for one in samples)
    busy, until = 0.0, -math.inf
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    tokens = sum(one["tokens"] for one in samples)
    rate = tokens / busy if busy > 0 else None
    return {"tokens": tokens, "decoding_seconds": busy, "tokens_per_second": rate}


def _degenerate_message(samples: Sequence[dict[str, Any]]) -> str:
    blank = sum(not sample["text"].strip() for sample in samples)
    bad = [sample for sample in samples if is_degenerate(sample["text"])]
    first = bad[0]
    return (
        f"no score: {len(bad)} of {len(samples)} answers are degenerate ({blank} of them blank, "
        f"the others one token over and over), more than the {DEGENERATE_LIMIT:.0%} allowed; the "
        f"first is problem {first['problem_id']}, sample {first['sample']}: "
        f"{first['text'][:40]!r}. This is a broken set-up: check the chat template and the "
        "tokenizer, then the checkpoint (nvfp4r inspect) and one prompt by hand (reset-generate). "
        "The samples are kept"
    )


def _share(flags: Sequence[bool]) -> float:
    return sum(map(bool, flags)) / len(flags)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
