"""The search of `reset-calibrate`: its flags, its problems, its runs, and what is stored of it."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from nvfp4r.console import notes
from reset.calibrate import Calibration
from reset.cli.run_tables import answer_progress
from reset.evaluate.engines import Engine
from reset.evaluate.graders import Grader, grader_versions
from reset.evaluate.held_out import held_out_task
from reset.evaluate.prompts import PromptForm
from reset.evaluate.runner import RunPlan
from reset.evaluate.search import search, search_arms, with_recommendation

FEW = 50
"""Fewer problems than this show only differences that one rarely meets."""


@dataclass(frozen=True)
class SearchFlags:
    """What the command was told; `t_lows` and `t_highs` are lists such as "0.1,0.3".

    Raises:
        ValueError: a list that is none, a value out of range, or an empty grid.
    """

    data: str
    task: str
    problems: int
    n_samples: int
    t_lows: str
    t_highs: str
    max_tokens: int
    top_p: float
    seed: int
    prompt: PromptForm
    folder: Path

    def __post_init__(self) -> None:
        search_arms(0.0, *self.grid)
        if self.problems < 2:
            raise ValueError(f"--search-problems is {self.problems}; it must be at least 2")

    @property
    def grid(self) -> tuple[list[float], list[float]]:
        return _numbers("--t-lows", self.t_lows), _numbers("--t-highs", self.t_highs)


def search_folder(output: Path, name: str | None) -> Path:
    """Where the answers are: beside the file, cal.search for cal.json."""
    part = "" if name is None else "." + re.sub(r"[^\w.-]+", "-", name)
    return output.with_name(f"{output.stem}{part}.search")


def search_plan(flags: SearchFlags, apart_from: Collection[str], *, resume: bool) -> RunPlan:
    """The problems and settings of every arm; nothing is written or loaded.

    Raises:
        ValueError: too few problems with answers, a value out of range, or a folder that is there.
        OSError, ImportError: the data cannot be read, or a grader's package is missing.
    """
    if flags.folder.exists() and not resume:
        raise ValueError(
            f"{flags.folder}: is there already; go on with its search (--resume), or remove it"
        )
    if flags.folder.exists() and not flags.folder.is_dir():
        raise ValueError(f"{flags.folder}: is a file, and the search keeps its answers there")
    held_out = held_out_task(
        flags.data,
        flags.problems,
        max_tokens=flags.max_tokens,
        apart_from=apart_from,
        task=flags.task,
    )
    with Grader() as grader:
        grader.check(held_out.problems)
    (config, *_) = search_arms(0.0, *flags.grid).values()
    return RunPlan(
        task=held_out,
        config=config,
        n_samples=flags.n_samples,
        seed=flags.seed,
        top_p=flags.top_p,
        prompt=flags.prompt,
        grading=grader_versions(),
    )


def run_search(
    found: Calibration, flags: SearchFlags, plan: RunPlan, engine: Engine, *, resume: bool
) -> Calibration:
    """Run every arm; `found` with the recommendation and what it rests on.

    Raises:
        ValueError, OSError: as `search`; what came before is kept.
    """
    tau_0 = float(found.config["tau_0"])
    arms = search_arms(tau_0, *flags.grid)
    notes().print(
        f"{len(arms)} arms of {len(plan.task.problems)} problems x {plan.n_samples} answers "
        f"(greedy: one); every answer is kept in {flags.folder}"
    )
    if len(plan.task.problems) < FEW:
        notes().print(
            f"{len(plan.task.problems)} problems are few: only large differences can be shown"
        )
    try:
        with Grader() as grader:
            done = search(
                arms,
                plan,
                engine,
                grader.grade,
                flags.folder,
                resume=resume,
                progress=answer_progress,
            )
    except KeyboardInterrupt:
        notes().print(f"stopped; what came is kept in {flags.folder}: go on with --resume")
        raise
    return with_recommendation(found, done, plan, flags.folder.name, engine)


def _numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"{flag} is {text!r}; need numbers with commas between, such as 0.1,0.3"
        ) from None
