"""How well the estimators of a step's entropy, which cannot see its end, do against its true mean.

The estimates are the product's own (`replay`). Knows records and numbers; draws nothing.
"""

from __future__ import annotations

import numpy as np

from reset.analyze.dump import ENTROPY_RULE, AnswerRecord, Dump
from reset.analyze.replay import Replayed, positions_in_step, replay, step_means
from reset.analyze.study import Row, Study, rounded
from reset.config import ESTIMATORS, ReSETConfig

POSITIONS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
"""First position of each group of positions in a step; the last group is open."""

_BATCH = 32  # answers replayed at once


def estimators(dump: Dump, window: int = 32) -> Study:
    """Error of each estimator against the mean over the whole step, by position in the step.

    Args:
        dump: with at least one answer.
        window: w of the estimators, in tokens.

    Raises:
        ValueError: the window is out of range, or an answer file is damaged.
    """
    configs = [
        ReSETConfig(policy="relative", t_low=1.0, estimator=name, window=window)
        for name in ESTIMATORS
    ]
    sums = np.zeros((len(configs), len(POSITIONS), _COLUMNS))
    done = dump.done()
    for start in range(0, len(done), _BATCH):
        answers = [dump.read(index) for index in done[start : start + _BATCH]]
        for number, replayed in enumerate(replay(answers, configs)):
            for answer, estimates in zip(answers, replayed, strict=True):
                sums[number] += _sums(answer, estimates)
    rows: list[Row] = []
    for number, name in enumerate(ESTIMATORS):
        for group, low in enumerate(POSITIONS):
            if sums[number, group, 0]:
                high = POSITIONS[group + 1] - 1 if group + 1 < len(POSITIONS) else None
                place = {"from_position": low, "to_position": high}
                rows.append({"estimator": name, **place, **_figures(sums[number, group])})
    overall = [
        {"estimator": name, **_figures(sums[number].sum(axis=0))}
        for number, name in enumerate(ESTIMATORS)
    ]
    best = min(overall, key=lambda row: row["mean_abs_error_nats"])
    return Study(
        name="estimators",
        rules={
            "entropy": ENTROPY_RULE,
            "error": "estimate before the token minus the mean over all tokens of its step",
            "agreement": "share of tokens for which estimate and step mean agree on whether the "
            "step is uncertain, above the mean of the answer so far",
            "estimators": "reset.rule (docs/policy.md)",
        },
        settings={"window": window},
        sources=[dump.provenance()],
        summary={
            "tokens": int(sums[0, :, 0].sum()),
            "smallest_mean_abs_error": best["estimator"],
        },
        tables={"overall": overall, "positions": rows},
    )


_COLUMNS = 5  # tokens, sum of |error|, of error squared, of error, agreements


def _sums(answer: AnswerRecord, estimates: Replayed) -> np.ndarray:
    """[groups, _COLUMNS] of one answer."""
    truth = step_means(answer)
    error = estimates.step_entropy - truth
    agrees = (estimates.step_entropy > estimates.mean_entropy) == (truth > estimates.mean_entropy)
    columns = np.stack([np.ones(len(answer)), np.abs(error), error**2, error, agrees], axis=1)
    group = np.searchsorted(POSITIONS, positions_in_step(answer), side="right") - 1
    total = np.zeros((len(POSITIONS), _COLUMNS))
    np.add.at(total, group, columns)
    return total


def _figures(sums: np.ndarray) -> dict[str, int | float]:
    count, absolute, squared, signed, agreements = sums.tolist()
    return {
        "tokens": int(count),
        "mean_abs_error_nats": rounded(absolute / count),
        "rmse_nats": rounded((squared / count) ** 0.5),
        "bias_nats": rounded(signed / count),
        "agreement": rounded(agreements / count),
    }
