"""Runs against a baseline on the same problems: paired differences and what they show.

Knows run folders and numbers; draws nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reset.config import ReSETConfig
from reset.evaluate.stats import (
    Estimate,
    Floats,
    paired_difference,
    score_estimate,
    sign_flip_p,
)
from reset.evaluate.store import SCORES, differences, read_settings

HIGHER, LOWER, NOT_SHOWN = "higher", "lower", "no difference shown"
_LEVEL = 0.95
_MUCH_TRUNCATION = 0.02
# They identify the run; the table says the rest.
_UNTOLD = ("engine.versions", "task_sources")


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, what decided it, and what scores.json says."""

    path: Path
    settings: dict[str, Any]
    scores: dict[str, Any]

    def by_problem(self, ids: Sequence[str]) -> Floats:
        """The mean of each problem's samples [P]."""
        return np.array([np.mean(self.scores["correct"][name]) for name in ids])


@dataclass(frozen=True)
class Line:
    """A run in a comparison; the first line is the baseline and has no difference.

    `ratio` is this run's score over the baseline's ("recovery" where the baseline is the model
    before quantisation), None if the baseline has no point. `p_value` is of a sign-flip test.
    """

    name: str
    score: Estimate
    seed_deviation: float | None
    difference: Estimate | None
    ratio: float | None
    p_value: float | None
    verdict: str
    truncated: float
    unparsed: float
    tokens_per_answer: float
    differs_in: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Lines, and remarks that a reader needs. `level` is that of each difference's interval."""

    task: str
    problems: int
    level: float
    lines: tuple[Line, ...]
    remarks: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; what is not known is None."""
        plain: dict[str, Any] = _without_nan(asdict(self))
        return plain


def read_run(path: Path) -> Run:
    """A run that has ended with a score.

    Raises:
        ValueError: no run, or one without a score.
    """
    settings = read_settings(path)
    file = path / SCORES
    if not file.exists():
        raise ValueError(
            f"{path}: has no {SCORES}: the run is not complete, or its output was refused; go on "
            "with --resume, which says which"
        )
    return Run(path, settings, json.loads(file.read_text(encoding="utf-8")))


def compare(runs: Sequence[Run]) -> Comparison:
    """Every run against the first, problem by problem.

    Each difference has a bootstrap interval over problems at level 1 - 0.05 / k for k comparisons,
    so that all of them hold together 95 times in 100; `verdict` says what it takes to show one.

    Raises:
        ValueError: fewer than two runs, one of them twice, or runs of different problems.
    """
    if len(runs) < 2:
        raise ValueError(f"{len(runs)} run was given; a comparison needs two or more")
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise ValueError("a run was given twice; name each once")
    baseline = runs[0]
    for other in runs[1:]:
        _check_same_task(baseline, other)
    ids = list(baseline.scores["correct"])
    level = 1 - (1 - _LEVEL) / (len(runs) - 1)
    names = _names([run.path for run in runs])
    lines = tuple(
        _line(run, name, baseline, ids, level) for run, name in zip(runs, names, strict=True)
    )
    return Comparison(
        task=baseline.settings["task"],
        problems=len(ids),
        level=level,
        lines=lines,
        remarks=tuple(_remarks(lines, len(ids))),
    )


def _line(run: Run, name: str, baseline: Run, ids: list[str], level: float) -> Line:
    own, base = run.by_problem(ids), baseline.by_problem(ids)
    is_baseline = run is baseline
    difference = None if is_baseline else paired_difference(base, own, level=level)
    p_value = None if is_baseline else sign_flip_p(own - base)
    return Line(
        name=name,
        score=score_estimate(own, level=_LEVEL),
        seed_deviation=run.scores["seed_deviation"],
        difference=difference,
        ratio=None if is_baseline or not base.any() else float(own.mean() / base.mean()),
        p_value=p_value,
        verdict="baseline" if difference is None else verdict(difference, p_value),
        truncated=run.scores["truncated"],
        unparsed=run.scores["unparsed"],
        tokens_per_answer=run.scores["tokens_per_answer"],
        differs_in=tuple(_differs_in(baseline, run)),
    )


def verdict(difference: Estimate, p_value: float | None) -> str:
    """What is shown: something only if the interval leaves 0 out and chance alone is unlikely.

    Both are held to the interval's level. The interval alone would see differences in a handful of
    problems.
    """
    if p_value is None or p_value > 1 - difference.level:
        return NOT_SHOWN
    if difference.low > 0:
        return HIGHER
    if difference.high < 0:
        return LOWER
    return NOT_SHOWN


def _differs_in(baseline: Run, run: Run) -> list[str]:
    """Settings that differ; another policy counts as one, whatever its parts."""
    one, two = dict(baseline.settings), dict(run.settings)
    found = []
    if one["policy"]["policy"] != two["policy"]["policy"]:
        policies = [ReSETConfig.from_dict(settings.pop("policy")) for settings in (one, two)]
        found.append(f"policy {policies[0]} -> {policies[1]}")
    found += [
        f"{name} {was!r} -> {now!r}"
        for name, was, now in differences(one, two)
        if not name.startswith(_UNTOLD)
    ]
    return found


def _check_same_task(one: Run, other: Run) -> None:
    ours, theirs = set(one.scores["correct"]), set(other.scores["correct"])
    if ours != theirs:
        raise ValueError(
            f"{one.path} and {other.path} are not of the same problems: {len(ours - theirs)} are "
            f"only in the first, {len(theirs - ours)} only in the second. Run both on the same "
            "task and data, with the same --max-problems"
        )
    if one.settings["task_sha256"] != other.settings["task_sha256"]:
        raise ValueError(
            f"{one.path} and {other.path} have the same problems with other texts or answers; run "
            "both on the same data"
        )


def _names(paths: Sequence[Path]) -> list[str]:
    """The folders' own names, or whole paths where two are alike."""
    short = [path.resolve().name for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]


def _remarks(lines: Sequence[Line], problems: int) -> list[str]:
    base = lines[0]
    found = []
    for line in lines[1:]:
        gap = line.truncated - base.truncated
        if abs(gap) > _MUCH_TRUNCATION:
            found.append(
                f"{line.name}: {line.truncated:.0%} of its answers are truncated, "
                f"{base.truncated:.0%} of the baseline's; part of a difference may be the limit's"
            )
        if len(line.differs_in) > 1:
            found.append(
                f"{line.name}: differs from the baseline in {len(line.differs_in)} settings, so no "
                "one of them can be named as the cause"
            )
    if problems < 30:
        found.append(f"{problems} problems are few: only large differences can be shown")
    return found


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value
