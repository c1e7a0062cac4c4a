"""What one model does in every arm: calibrate, choose, decode, grade, report.

The result is plain values, so that it can be kept between the models of a study. Knows no
comparison between arms or models.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lab.pocket_reasoner.arms import (
    TAU_0_TEMPERATURE,
    candidates,
    choose,
    samples_of,
    study_arms,
)
from lab.pocket_reasoner.decode import BatchEngine
from lab.pocket_reasoner.grading import as_task_problem, grade
from lab.pocket_reasoner.problems import FAMILIES, Difficulty, Split, make_problems
from reset.calibrate import DEFAULT_PERCENTILE, percentile_threshold
from reset.config import ReSETConfig
from reset.evaluate.engines import Request
from reset.evaluate.problems import Problem
from reset.evaluate.report import DegenerateOutputError, make_report
from reset.evaluate.runner import RunPlan
from reset.evaluate.tasks import Task

Progress = Callable[[str, int, int], None]
"""Called with what is being decoded, answers done and answers in all."""


@dataclass(frozen=True)
class Scale:
    """How much is decoded.

    Args:
        problems: evaluation problems of each family.
        seeds: answers to each in a sampled arm.
        calibration_problems: of each family, for tau_0 and for the choice of temperatures.
        calibration_seeds: answers to each of them in a sampled candidate.
        max_tokens: of an answer.
        top_p: nucleus of every sampled arm.
    """

    problems: int = 500
    seeds: int = 8
    calibration_problems: int = 100
    calibration_seeds: int = 4
    max_tokens: int = 640
    top_p: float = 0.95

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")


QUICK = Scale(problems=40, seeds=1, calibration_problems=8, calibration_seeds=1, max_tokens=448)
"""For a CPU. One answer a problem: as many answers to fewer problems tell less of a difference. Of
the worked solutions of evaluation searches, 1 in 2,000 is longer than that; of chains, none."""


def measure_model(
    engine: BatchEngine, scale: Scale, difficulty: Difficulty, progress: Progress
) -> dict[str, Any]:
    """Every arm on one model; see `Measured` for the keys.

    Raises:
        ValueError: logits turn NaN, or an answer does not fit the model.
    """
    tasks = {split: _tasks(split, scale, difficulty) for split in ("calibration", "evaluation")}
    held_out = tasks["calibration"]
    tau_0 = _tau_0(engine, held_out, scale, progress)
    tried = candidates(tau_0)
    graded = _graded(engine, tried, held_out, scale, scale.calibration_seeds, "choosing", progress)
    scores = {name: float(np.mean([s["correct"] for s in graded[name]])) for name in tried}
    (t_low, t_high), best_fixed = choose(scores)
    arms = study_arms(tau_0, t_low, t_high)
    samples = _graded(engine, arms, tasks["evaluation"], scale, scale.seeds, "evaluating", progress)
    return {
        "engine": engine.describe(),
        "calibration": {
            "tau_0_nats": tau_0,
            "t_low": t_low,
            "t_high": t_high,
            "best_fixed": best_fixed,
            "scores": scores,
        },
        "arms": {
            name: {
                "policy": config.to_dict(),
                "families": {
                    family: _report(samples[name], task, samples_of(config, scale.seeds))
                    for family, task in tasks["evaluation"].items()
                },
            }
            for name, config in arms.items()
        },
        "task_sha256": {family: task.sha256 for family, task in tasks["evaluation"].items()},
        "examples": _examples(samples),
    }


def _tasks(split: Split, scale: Scale, difficulty: Difficulty) -> dict[str, Task]:
    """A task of each family; calibration and evaluation problems never overlap."""
    count = scale.problems if split == "evaluation" else scale.calibration_problems
    return {
        family: Task(
            name=f"pocket-{family}",
            problems=tuple(
                as_task_problem(one)
                for one in make_problems(family, split, count, difficulty=difficulty)
            ),
            sources=(f"lab.pocket_reasoner.problems, split {split}, seed 0",),
            expected=count,
            max_tokens=scale.max_tokens,
        )
        for family in FAMILIES
    }


def _requests(
    config: ReSETConfig, tasks: Mapping[str, Task], scale: Scale, seeds: int
) -> list[tuple[Problem, int, Request]]:
    """(problem, number of the sample, request) of every answer of an arm."""
    found = []
    for task in tasks.values():
        plan = RunPlan(task, config, n_samples=seeds, top_p=scale.top_p, prompt="plain")
        for number, problem in itertools.product(range(seeds), task.problems):
            found.append((problem, number, plan.request(problem, number)))
    return found


def _tau_0(
    engine: BatchEngine, tasks: Mapping[str, Task], scale: Scale, progress: Progress
) -> float:
    """The 80th percentile of the model's own token entropies on calibration problems, nats."""
    config = ReSETConfig(policy="fixed", base_temp=TAU_0_TEMPERATURE)
    wanted = _requests(config, tasks, scale, 1)
    # There are few: rows without a request would cost as much as the others.
    rows = min(len(wanted), engine.rows)
    small = BatchEngine(engine.model, engine.tokenizer, rows=rows, graphs=engine.graphs)
    entropies = [
        decoded.entropy_nats
        for _, decoded in small.decode(
            [request for _, _, request in wanted],
            lambda done: progress("tau_0", done, len(wanted)),
        )
    ]
    return percentile_threshold(entropies, DEFAULT_PERCENTILE)


def _graded(
    engine: BatchEngine,
    arms: Mapping[str, ReSETConfig],
    tasks: Mapping[str, Task],
    scale: Scale,
    seeds: int,
    what: str,
    progress: Progress,
) -> dict[str, list[dict[str, Any]]]:
    """Samples of every arm, as `reset.evaluate.report` takes them; decoded in one queue."""
    wanted = [
        (name, *one)
        for name, config in arms.items()
        for one in _requests(config, tasks, scale, samples_of(config, seeds))
    ]
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    answers = engine.generate([request for *_, request in wanted])
    for done, (index, answer) in enumerate(answers, start=1):
        name, problem, number, _ = wanted[index]
        verdict = grade(answer, problem)
        samples[name].append(
            {
                "problem_id": problem.id,
                "sample": number,
                **asdict(answer),
                "correct": verdict.correct,
                "extracted": verdict.extracted,
                "detail": verdict.detail,
            }
        )
        if done % 64 == 0 or done == len(wanted):
            progress(what, done, len(wanted))
    return samples


def _report(samples: Sequence[dict[str, Any]], task: Task, seeds: int) -> dict[str, Any]:
    """The report of one family, or why there is none."""
    ids = [problem.id for problem in task.problems]
    wanted = set(ids)
    mine = [sample for sample in samples if sample["problem_id"] in wanted]
    try:
        return make_report(mine, ids, seeds).to_dict()
    except DegenerateOutputError as error:
        return {"no_score": str(error)}


def _examples(samples: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The first answers of each arm, for reading: two a family, sample 0, by problem id."""
    found = []
    for name, mine in samples.items():
        first = sorted((s for s in mine if s["sample"] == 0), key=lambda s: str(s["problem_id"]))
        for family in FAMILIES:
            of_family = [s for s in first if str(s["problem_id"]).startswith(family)]
            found += [{"arm": name, **sample} for sample in of_family[:2]]
    return found
