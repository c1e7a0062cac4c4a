"""Token entropy against the entropy of the token's own step.

Knows records and numbers; draws nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reset.analyze.dump import ENTROPY_RULE, Dump
from reset.analyze.replay import PERCENTILE_RULE, step_means
from reset.analyze.study import Row, Study, rounded

_GROUPS = 10  # of equally many tokens, by the entropy of their step
_PERCENTILES = (10, 50, 80, 90, 99)
_CELLS = 40  # of the two-dimensional histogram, along each side


def step_entropies(dump: Dump, tau_0: float | None = None) -> Study:
    """Percentiles of token entropy for tokens grouped by their step's mean entropy.

    Args:
        dump: with at least one answer.
        tau_0: a global threshold in nats to hold against them, or None.

    Raises:
        ValueError: an answer file is damaged, or tau_0 is negative.
    """
    if tau_0 is not None and not tau_0 >= 0:
        raise ValueError(f"tau_0 is {tau_0} nats; it must be at least 0")
    tokens, steps, lengths, others = [], [], [], []
    for answer in dump.answers():
        entropy, means = answer.entropy_nats.astype(np.float64), step_means(answer)
        length = np.bincount(answer.step)
        of_token = length[answer.step]
        # Without the token itself, or every short step would correlate with its own tokens.
        alone = of_token == 1
        rest = (means * of_token - entropy) / np.where(alone, 1, of_token - 1)
        tokens.append(entropy)
        steps.append(means)
        lengths.append(length)
        others.append(np.where(alone, np.nan, rest))
    token, step, rest = np.concatenate(tokens), np.concatenate(steps), np.concatenate(others)
    return Study(
        name="steps",
        rules={
            "entropy": ENTROPY_RULE,
            "step entropy": "mean over all tokens of the step, the token itself included",
            "correlation": "Pearson, of a token's entropy with the mean of the other tokens of "
            "its step; steps of one token left out",
            "percentile": PERCENTILE_RULE,
        },
        settings={"tau_0_nats": tau_0},
        sources=[dump.provenance()],
        summary={
            **_step_numbers(np.concatenate(lengths)),
            "correlation": _correlation(token, rest),
        },
        tables={"groups": _groups(token, step, tau_0), "histogram": _cells(token, step)},
    )


def _step_numbers(lengths: np.ndarray) -> dict[str, Any]:
    low, middle, high = np.percentile(lengths, (10, 50, 90), method="linear")
    return {
        "tokens": int(lengths.sum()),
        "steps": len(lengths),
        "tokens_per_step_p10": rounded(low),
        "tokens_per_step_p50": rounded(middle),
        "tokens_per_step_p90": rounded(high),
    }


def _correlation(token: np.ndarray, rest: np.ndarray) -> float | None:
    """None where it is not defined."""
    kept = ~np.isnan(rest)
    if kept.sum() < 2 or np.ptp(token[kept]) == 0 or np.ptp(rest[kept]) == 0:
        return None
    return rounded(np.corrcoef(token[kept], rest[kept])[0, 1])


def _groups(token: np.ndarray, step: np.ndarray, tau_0: float | None) -> list[Row]:
    edges = np.unique(np.percentile(step, np.linspace(0, 100, _GROUPS + 1), method="linear"))
    # Tokens of one step have one value, so that a group holds whole steps.
    group = np.clip(np.searchsorted(edges, step, side="right") - 1, 0, max(len(edges) - 2, 0))
    rows: list[Row] = []
    for number in np.unique(group):
        inside = group == number
        mine, means = token[inside], step[inside]
        values = np.percentile(mine, _PERCENTILES, method="linear")
        row: dict[str, Any] = {
            "step_from_nats": rounded(means.min()),
            "step_to_nats": rounded(means.max()),
            "step_mean_nats": rounded(means.mean()),
            "tokens": int(inside.sum()),
            **{f"p{p}_nats": rounded(v) for p, v in zip(_PERCENTILES, values, strict=True)},
            "at_or_above_step": rounded((mine >= means).mean()),
        }
        if tau_0 is not None:
            row["at_or_above_tau_0"] = rounded((mine >= tau_0).mean())
        rows.append(row)
    return rows


def _cells(token: np.ndarray, step: np.ndarray) -> list[Row]:
    """Counts of tokens by step entropy and token entropy; empty cells are left out."""
    sides = [np.linspace(0, max(float(values.max()), 1e-6), _CELLS + 1) for values in (step, token)]
    counts = np.histogram2d(step, token, bins=sides)[0].astype(np.int64)
    return [
        {
            "step_from_nats": rounded(sides[0][i]),
            "step_to_nats": rounded(sides[0][i + 1]),
            "token_from_nats": rounded(sides[1][j]),
            "token_to_nats": rounded(sides[1][j + 1]),
            "tokens": int(counts[i, j]),
        }
        for i, j in np.argwhere(counts)
    ]
