"""The arms of the study: which policies, and how calibration problems choose their parameters.

Knows configurations and scores; decodes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from reset.config import ReSETConfig
from reset.evaluate.search import T_HIGHS, T_LOWS

FIXED = {
    "greedy": ReSETConfig(policy="fixed", base_temp=0.0),
    "T=0.3": ReSETConfig(policy="fixed", base_temp=0.3),
    "T=0.6": ReSETConfig(policy="fixed", base_temp=0.6),
    "T=1.0": ReSETConfig(policy="fixed", base_temp=1.0),
}
STEP_AWARE = {
    "ReSET": "reset",
    "threshold": "threshold",
    "sliding": "sliding",
    "relative": "relative",
    "uniform": "uniform",
}
ARMS = (*FIXED, *STEP_AWARE)

TAU_0_TEMPERATURE = 0.6
"""Calibration problems are decoded at this temperature for tau_0, as reset-calibrate does."""


def candidates(tau_0: float) -> dict[str, ReSETConfig]:
    """What calibration problems are decoded with to choose: ReSET's grid and fixed temperatures."""
    grid = {
        f"{low}/{high}": ReSETConfig(t_low=low, t_high=high, tau_0=tau_0)
        for low in T_LOWS
        for high in T_HIGHS
    }
    return {**grid, **FIXED}


def choose(scores: Mapping[str, float]) -> tuple[tuple[float, float], str]:
    """From the calibration score of each candidate: (T_low, T_high) and the best fixed arm.

    The first of equals counts, in the order of `candidates`.
    """
    grid = [name for name in scores if name not in FIXED]
    low, _, high = max(grid, key=lambda name: scores[name]).partition("/")
    return (float(low), float(high)), max(FIXED, key=lambda name: scores[name])


def study_arms(tau_0: float, t_low: float, t_high: float) -> dict[str, ReSETConfig]:
    """Every arm by name; the step-aware ones share their temperatures and, if any, tau_0."""
    step_aware = {
        name: ReSETConfig(t_low=t_low, t_high=t_high, tau_0=tau_0, policy=policy)
        for name, policy in STEP_AWARE.items()
    }
    return {**FIXED, **step_aware}


def samples_of(config: ReSETConfig, seeds: int) -> int:
    """How many answers to each problem an arm needs: greedy ones are all alike."""
    return 1 if config.policy == "fixed" and config.may_be_greedy else seeds
