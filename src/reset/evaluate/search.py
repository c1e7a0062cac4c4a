"""T_low and T_high by a grid, always beside fixed temperatures, and what the grid can recommend.

Every arm is a run of its own on the same problems and seeds. Knows runs and their reports; the
statistics are stats.py's, the files those of store.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from reset.calibrate import Calibration, text_sha256
from reset.config import ReSETConfig
from reset.evaluate.engines import Engine
from reset.evaluate.report import DegenerateOutputError, Report
from reset.evaluate.runner import Grader, Progress, RunPlan, run
from reset.evaluate.stats import RESAMPLES, Differences, Estimate, Floats, all_differences

T_LOWS, T_HIGHS = (0.1, 0.3, 0.5), (0.6, 1.0)
FIXED = (0.0, 0.3, 0.6, 1.0)
"""Temperatures that every search has beside its grid; 0 is greedy."""

METHOD = (
    "paired by problem; intervals of all ReSET arms minus all fixed temperatures hold together at "
    "95 % (largest t over all pairs, sign flips)"
)


@dataclass(frozen=True)
class Arm:
    """A policy and its report; None where its output was no text, and then `refused` says why."""

    name: str
    config: ReSETConfig
    report: Report | None
    refused: str = ""

    @property
    def is_fixed(self) -> bool:
        return self.config.policy == "fixed"

    @property
    def by_problem(self) -> Floats:
        """The mean of each problem's samples [P]."""
        assert self.report is not None
        return np.array([np.mean(values) for values in self.report.correct.values()])


@dataclass(frozen=True)
class Recommendation:
    """What the arms show.

    `kind` is "reset" if the best ReSET arm is better than every fixed temperature, "fixed" if the
    best fixed temperature is better than every ReSET arm, else "none". `difference` is best ReSET
    arm minus best fixed temperature; its interval allows for both having been chosen here.
    """

    kind: Literal["reset", "fixed", "none"]
    reset: Arm
    fixed: Arm
    difference: Estimate
    problems: int

    @property
    def config(self) -> dict[str, Any]:
        """The values to store for `ReSETConfig.from_file`; none where none were shown better."""
        if self.kind == "reset":
            return {"t_low": self.reset.config.t_low, "t_high": self.reset.config.t_high}
        if self.kind == "fixed":
            return {"policy": "fixed", "base_temp": self.fixed.config.base_temp}
        return {}

    def __str__(self) -> str:
        reset = f"ReSET at T_low {self.reset.config.t_low:g}, T_high {self.reset.config.t_high:g}"
        greedy = " (greedy)" if self.fixed.config.may_be_greedy else ""
        fixed = f"fixed temperature of {self.fixed.config.base_temp:g}{greedy}"
        found, level = self.difference, f"{100 * self.difference.level:g} % interval"
        points = f"{100 * found.mean:+.1f} points"
        ends = f"{level} {100 * found.low:+.1f} .. {100 * found.high:+.1f}"
        over = f"{self.problems} problems"
        if self.kind == "reset":
            best = f"the best fixed temperature ({_short(self.fixed)})"
            return f"{reset}: {points} from {best}, {ends}, {over}"
        if self.kind == "fixed":
            best = f"the best of ReSET ({_short(self.reset)})"
            return f"use a {fixed}: {best} is at {points} from it, {ends}, {over}"
        return (
            f"no difference shown: the best of ReSET ({_short(self.reset)}) is at {points} from "
            f"the best fixed temperature ({_short(self.fixed)}), {ends}, {over}"
        )


def search_arms(
    tau_0: float,
    t_lows: Sequence[float] = T_LOWS,
    t_highs: Sequence[float] = T_HIGHS,
    fixed: Sequence[float] = FIXED,
) -> dict[str, ReSETConfig]:
    """The arms by name: fixed temperatures first, then the grid.

    Pairs with T_low >= T_high are left out: they are a fixed temperature, or nonsense.

    Raises:
        ValueError, TypeError: a value out of range, or no pair left.

    Example:
        >>> list(search_arms(0.5, [0.1, 0.7], [0.6]))
        ['greedy', 'fixed-0.3', 'fixed-0.6', 'fixed-1', 'reset-0.1-0.6']
    """
    arms = {}
    for temperature in fixed:
        config = ReSETConfig(policy="fixed", base_temp=temperature)
        arms["greedy" if config.may_be_greedy else f"fixed-{temperature:g}"] = config
    for low in t_lows:
        ReSETConfig(t_low=low, t_high=max(low, 1.0), tau_0=tau_0)  # checks those left out as well
    for high in t_highs:
        ReSETConfig(t_low=0.0, t_high=high, tau_0=tau_0)
    pairs = [(low, high) for low in t_lows for high in t_highs if low < high]
    for low, high in pairs:
        arms[f"reset-{low:g}-{high:g}"] = ReSETConfig(t_low=low, t_high=high, tau_0=tau_0)
    if not pairs:
        raise ValueError(
            f"the grid is empty: no T_low of {list(t_lows)} is below a T_high of {list(t_highs)}"
        )
    return arms


def search(
    arms: Mapping[str, ReSETConfig],
    plan: RunPlan,
    engine: Engine,
    grade: Grader,
    folder: Path,
    *,
    resume: bool = False,
    progress: Callable[[str], AbstractContextManager[Progress | None]] = lambda _: nullcontext(),
) -> list[Arm]:
    """Run every arm, each in a folder of its own inside `folder`, which is made if need be.

    An arm whose output is degenerate keeps its answers and has no report; the others go on.

    Args:
        arms: by name, as `search_arms` makes them.
        plan: its policy is replaced by each arm's; greedy arms have one sample a problem.
        resume: go on with what is there.
        progress: called with an arm's name; its context gives what is told of each answer.

    Raises:
        ValueError, OSError: as `run`.
    """
    folder.mkdir(exist_ok=True)
    done = []
    for name, config in arms.items():
        samples = 1 if config.policy == "fixed" and config.may_be_greedy else plan.n_samples
        one = replace(plan, config=config, n_samples=samples)
        with progress(name) as advance:
            try:
                report = run(one, engine, grade, folder / name, resume=resume, on_progress=advance)
            except DegenerateOutputError as error:
                done.append(Arm(name, config, None, str(error)))
            else:
                done.append(Arm(name, config, report))
    return done


def recommend(
    arms: Sequence[Arm], *, seed: int = 0, flips: int = RESAMPLES
) -> tuple[Recommendation, Differences]:
    """What the arms show, and all differences: ReSET arms [A] minus fixed ones [B], in their order.

    Arms without a report are left out.

    Raises:
        DegenerateOutputError: no ReSET arm, or no fixed temperature, has a report.
    """
    reset = [arm for arm in arms if arm.report is not None and not arm.is_fixed]
    fixed = [arm for arm in arms if arm.report is not None and arm.is_fixed]
    if not reset or not fixed:
        refused = next((arm for arm in arms if arm.refused), None)
        because = f"; {refused.name}: {refused.refused}" if refused else ""
        missing = "fixed temperature" if reset else "ReSET arm"
        raise DegenerateOutputError(f"no {missing} has a score: nothing to compare{because}")
    scores = [np.stack([arm.by_problem for arm in group]) for group in (reset, fixed)]
    found = all_differences(*scores, seed=seed, flips=flips)
    best_reset, best_fixed = (int(group.mean(axis=1).argmax()) for group in scores)
    kind: Literal["reset", "fixed", "none"] = "none"
    if (found.low[best_reset] > 0).all():
        kind = "reset"
    elif (found.high[:, best_fixed] < 0).all():
        kind = "fixed"
    paired = scores[0][best_reset] - scores[1][best_fixed]
    error = paired.std(ddof=1) / np.sqrt(len(paired)) if len(paired) > 1 else np.nan
    best = (best_reset, best_fixed)
    difference = Estimate(
        mean=float(found.mean[best]),
        standard_error=float(error),
        low=float(found.low[best]),
        high=float(found.high[best]),
        level=found.level,
    )
    return (
        Recommendation(kind, reset[best_reset], fixed[best_fixed], difference, len(paired)),
        found,
    )


def arm_rows(
    arms: Sequence[Arm], recommendation: Recommendation, differences: Differences
) -> list[dict[str, Any]]:
    """One plain row an arm, for the file and the table.

    `difference` is from the best fixed temperature, null for fixed ones and arms without a report.
    """
    fixed = [arm.name for arm in arms if arm.is_fixed and arm.report is not None]
    column = fixed.index(recommendation.fixed.name)
    rows = []
    place = 0
    for arm in arms:
        row: dict[str, Any] = {"name": arm.name, "config": arm.config.to_dict()}
        if arm.report is None:
            rows.append({**row, "refused": arm.refused, "difference": None})
            continue
        plain = arm.report.to_dict()
        plain.pop("correct")
        difference = None
        if not arm.is_fixed:
            names = ("mean", "low", "high")
            difference = {name: float(getattr(differences, name)[place, column]) for name in names}
            place += 1
        rows.append({**row, **plain, "refused": "", "difference": difference})
    return rows


def with_recommendation(
    found: Calibration, arms: Sequence[Arm], plan: RunPlan, folder: str, engine: Engine
) -> Calibration:
    """`found` with what the arms recommend in `config`, and all that it rests on in `search`.

    Args:
        found: with tau_0.
        arms: of `search`.
        plan: theirs.
        folder: name of the folder that holds them, beside the file.
        engine: theirs.

    Raises:
        DegenerateOutputError: as `recommend`.
    """
    best, differences = recommend(arms, seed=plan.seed)
    settings = plan.settings(engine)
    for of_an_arm in ("policy", "n_samples", "seeds"):
        settings.pop(of_an_arm)
    return replace(
        found,
        config={"tau_0": found.config["tau_0"], **best.config},
        recommendation=str(best),
        search={
            "kind": best.kind,
            "method": METHOD,
            "best_reset": best.reset.name,
            "best_fixed": best.fixed.name,
            "folder": folder,
            "problems": [text_sha256(problem.question) for problem in plan.task.problems],
            "seeds": plan.seeds,
            "settings": settings,
            "arms": arm_rows(arms, best, differences),
        },
    )


def _short(arm: Arm) -> str:
    config = arm.config
    if arm.is_fixed:
        return "greedy" if config.may_be_greedy else f"{config.base_temp:g}"
    return f"T_low {config.t_low:g}, T_high {config.t_high:g}"
