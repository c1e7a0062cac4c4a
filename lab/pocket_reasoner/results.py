"""From the reports of every model and arm to comparisons: what is shown, and what is not.

Two questions, each answered problem by problem: what a policy does against the best fixed
temperature of the same model, which calibration problems chose; and what quantisation costs under
the same policy. Intervals and verdicts are those of `reset-run compare`: widened for the number of
comparisons in a table. Knows numbers; decodes and draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from reset.evaluate.compare import verdict
from reset.evaluate.stats import Floats, paired_difference, score_estimate, sign_flip_p

REFERENCE = "bf16"
_LEVEL = 0.95


def compare_all(models: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Scores over both families, and the two kinds of differences.

    Args:
        models: what `measure.measure_model` returned, by name of the model.

    Returns:
        "scores": {model: {arm: estimate}}, "against_best_fixed": {model: {arm: difference}},
        "cost_of_quantisation": {model: {arm: difference}}; an arm without a score is left out.
    """
    scores = {
        model: {arm: found for arm in facts["arms"] if (found := _scores(facts, arm)) is not None}
        for model, facts in models.items()
    }
    by_policy, by_form = {}, {}
    for model, facts in models.items():
        own = scores[model]
        best = facts["calibration"]["best_fixed"]
        pairs = {arm: (own[best], own[arm]) for arm in own if arm != best} if best in own else {}
        by_policy[model] = _differences(pairs)
        if model != REFERENCE and REFERENCE in models:
            whole = scores[REFERENCE]
            by_form[model] = _differences({a: (whole[a], own[a]) for a in own if a in whole})
    return {
        "scores": {
            model: {arm: _plain(asdict(score_estimate(values))) for arm, values in own.items()}
            for model, own in scores.items()
        },
        "against_best_fixed": by_policy,
        "cost_of_quantisation": by_form,
    }


def _scores(facts: Mapping[str, Any], arm: str) -> Floats | None:
    """Mean of each problem's samples, families one behind the other; None without a score."""
    reports: Sequence[Mapping[str, Any]] = list(facts["arms"][arm]["families"].values())
    if any("correct" not in report for report in reports):
        return None
    means = [np.mean(flags) for report in reports for flags in report["correct"].values()]
    return np.array(means, dtype=np.float64)


def _differences(pairs: Mapping[str, tuple[Floats, Floats]]) -> dict[str, dict[str, Any]]:
    """Second minus first of every pair, all intervals together at 95 %."""
    found = {}
    for arm, (one, two) in pairs.items():
        level = 1 - (1 - _LEVEL) / len(pairs)
        difference = paired_difference(one, two, level=level)
        p_value = sign_flip_p(two - one)
        found[arm] = {
            **_plain(asdict(difference)),
            "p_value": p_value,
            "verdict": verdict(difference, p_value),
        }
    return found


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in values.items()
    }
