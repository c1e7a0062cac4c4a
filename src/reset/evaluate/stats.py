"""Means, standard errors and bootstrap intervals over problems.

Problems are what is drawn from a larger world, so they are what is resampled; samples of one
problem are not independent of each other. Knows arrays, no runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
_BLOCK = 256  # resamples at a time: bounds the memory

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its uncertainty; `level` is the interval's, such as 0.95."""

    mean: float
    standard_error: float
    low: float
    high: float
    level: float


def estimate(scores: Floats, *, seed: int = 0, level: float = 0.95) -> Estimate:
    """The mean of `scores` [P], one value a problem, with a bootstrap interval.

    The standard error is that of the mean over problems; the interval is the percentile interval of
    10,000 resamples, drawn with `seed`. With one problem neither can be known: both are NaN.

    Raises:
        ValueError: no problems, or a level outside (0, 1).
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"scores have shape {values.shape}; need one value a problem")
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must be between 0 and 1")
    mean = float(values.mean())
    if len(values) == 1:
        return Estimate(mean, float("nan"), float("nan"), float("nan"), level)
    means = bootstrap_means(values, seed=seed)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    error = float(values.std(ddof=1) / np.sqrt(len(values)))
    return Estimate(mean, error, float(low), float(high), level)


def paired_difference(
    baseline: Floats, other: Floats, *, seed: int = 0, level: float = 0.95
) -> Estimate:
    """`other` minus `baseline`, problem by problem: both [P], in the same order.

    Raises:
        ValueError: their lengths differ.
    """
    one, two = np.asarray(baseline, np.float64), np.asarray(other, np.float64)
    if one.shape != two.shape:
        raise ValueError(
            f"the runs have {one.shape} and {two.shape} scores; need the same problems"
        )
    return estimate(two - one, seed=seed, level=level)


def score_estimate(scores: Floats, *, seed: int = 0, level: float = 0.95) -> Estimate:
    """`estimate` for scores within 0 .. 1, also where all of them are 0, or all 1.

    Resamples of equal values are equal, and an interval of no width would claim to know what a few
    problems cannot tell: there, the exact (Clopper-Pearson) interval of a share takes its place.
    """
    found = estimate(scores, seed=seed, level=level)
    values = np.asarray(scores, dtype=np.float64)
    if len(values) < 2 or np.any(values != values[0]) or found.mean not in (0.0, 1.0):
        return found
    reach = 1 - ((1 - level) / 2) ** (1 / len(values))
    if found.mean == 0.0:
        return replace(found, high=reach)
    return replace(found, low=1 - reach)


def sign_flip_p(differences: Floats, *, seed: int = 0) -> float:
    """How often chance alone, without a difference, gives a mean as far from 0 as this one.

    Without a difference each problem's value is as likely with the other sign: 10,000 random flips,
    two-sided. Holds for few problems too, where a bootstrap interval is too narrow.
    """
    values = np.asarray(differences, dtype=np.float64)
    generator = np.random.default_rng(seed)
    seen = abs(values.mean()) * (1 - 1e-12)  # equal means may differ in rounding
    as_far = 0
    for done in range(0, RESAMPLES, _BLOCK):
        signs = generator.choice([-1.0, 1.0], (min(_BLOCK, RESAMPLES - done), len(values)))
        as_far += int((np.abs((signs * values).mean(axis=1)) >= seen).sum())
    return (1 + as_far) / (1 + RESAMPLES)


@dataclass(frozen=True)
class Differences:
    """`mean`, `low` and `high` [A, B] of each of A minus each of B, within -1 .. 1.

    All A x B intervals hold together with probability `level`.
    """

    mean: Floats
    low: Floats
    high: Floats
    level: float


def all_differences(
    one: Floats, other: Floats, *, seed: int = 0, level: float = 0.95, flips: int = RESAMPLES
) -> Differences:
    """Every arm of `one` minus every arm of `other`, with intervals that hold all at once.

    So they hold for the pair that looks best too, whichever it is: choosing the best of many arms
    and then quoting its own interval would promise too much. The intervals are mean +- c standard
    errors; c is the 95 % point of the largest |t| of all pairs when each problem's differences
    take a random sign together (10,000 flips), which keeps how the arms go with each other. An
    interval leaves 0 out exactly where that test, adjusted for all pairs, shows a difference.

    Args:
        one, other: [A, P] and [B, P] scores 0 .. 1, one value an arm and problem.
        seed, flips: of the random signs, and how many draws.
        level: of all intervals together.

    Raises:
        ValueError: not the same problems, none, no arm, or a level outside (0, 1).
    """
    ours, theirs = np.asarray(one, np.float64), np.asarray(other, np.float64)
    if ours.ndim != 2 or theirs.ndim != 2 or ours.shape[1:] != theirs.shape[1:]:
        raise ValueError(f"scores have shapes {ours.shape} and {theirs.shape}; need [A, P], [B, P]")
    if not ours.size or not theirs.size:
        raise ValueError(f"scores have shapes {ours.shape} and {theirs.shape}; need at least one")
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must be between 0 and 1")
    count = ours.shape[1]
    pairs = (ours[:, None, :] - theirs[None, :, :]).reshape(-1, count)  # [A*B, P]
    mean = pairs.mean(axis=1)
    size = np.sqrt((pairs**2).mean(axis=1))  # flips do not change it
    differ = size > 0
    # What no difference anywhere leaves open: as many problems may differ as these could miss.
    reach = np.full(len(pairs), 1 - ((1 - level) / len(pairs)) ** (1 / count))
    if differ.any():
        limit = _largest_reach(pairs[differ] / size[differ, None], seed, level, flips)
        spread = np.sqrt(np.maximum(size[differ] ** 2 - mean[differ] ** 2, 0.0))
        # mean / size is at most 1, and t = (mean / spread) sqrt(P - 1) grows with it: the largest
        # t of the flips is that of `limit`, so reach = t * spread / sqrt(P - 1).
        reach[differ] = spread * limit / np.sqrt(1 - limit**2) if limit < 1 - 1e-9 else np.inf
    shape = (len(ours), len(theirs))
    low, high = np.clip(mean - reach, -1, 1), np.clip(mean + reach, -1, 1)
    return Differences(mean.reshape(shape), low.reshape(shape), high.reshape(shape), level)


def _largest_reach(scaled: Floats, seed: int, level: float, flips: int) -> float:
    """The `level` point of max |mean of flipped| over the rows of `scaled` [pairs, P], <= 1.

    Rows have mean square 1. Counted as a test counts, so that exceeding it has p <= 1 - level.
    """
    generator = np.random.default_rng(seed)
    count = scaled.shape[1]
    largest = []
    for done in range(0, flips, _BLOCK):
        signs = generator.integers(0, 2, (min(_BLOCK, flips - done), count), np.int8) * 2.0 - 1
        largest.append(np.abs(signs @ scaled.T).max(axis=1) / count)
    ordered = np.sort(np.concatenate(largest))[::-1]
    allowed = int((1 - level) * (flips + 1) + 1e-9)  # how often, itself among them
    if allowed < 1:
        return 1.0
    return float(min(1.0, ordered[allowed - 1] * (1 + 1e-12)))  # equal means differ in rounding


def bootstrap_means(values: Floats, *, seed: int = 0, resamples: int = RESAMPLES) -> Floats:
    """Means [resamples] of resamples of `values` [P], drawn with replacement."""
    generator = np.random.default_rng(seed)
    count = len(values)
    means = [
        values[generator.integers(0, count, (min(_BLOCK, resamples - done), count))].mean(axis=1)
        for done in range(0, resamples, _BLOCK)
    ]
    return np.concatenate(means)
