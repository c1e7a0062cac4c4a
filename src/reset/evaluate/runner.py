"""One run: ask every problem n times, grade each answer as it comes, keep it, report.

Knows the order of things; engines decode, graders judge, the store keeps.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import reset
from reset.config import ReSETConfig
from reset.evaluate.engines import Engine, Request
from reset.evaluate.problems import Answer, Problem
from reset.evaluate.prompts import PromptForm, messages, template
from reset.evaluate.report import Report, make_report, refuse_degenerate, speed
from reset.evaluate.store import RunFolder
from reset.evaluate.tasks import OR, Task


class Graded(Protocol):
    """What a grader says: `extracted` is the answer that it found, None if it found none."""

    @property
    def correct(self) -> bool: ...
    @property
    def extracted(self) -> str | None: ...
    @property
    def detail(self) -> str: ...


_FIRST_LOOK = 20  # answers after which a broken set-up is told, rather than after hours
_HOPELESS = 0.5

Grader = Callable[[Answer, Problem], Graded]
Progress = Callable[[int, int, int], None]
"""Called with samples done, samples in all, and tokens decoded by this session."""


@dataclass(frozen=True)
class RunPlan:
    """What is asked of an engine.

    Args:
        task: problems.
        config: temperature policy of every answer.
        n_samples: answers to each problem, >= 1.
        seed: sample k of every problem belongs to seed `seed + k`.
        max_tokens: output limit of an answer; the task's own if None.
        top_p: nucleus, (0, 1].
        min_p: [0, 1); 0 is off.
        prompt: form of the prompt (prompts.py).
        system: system prompt.
        grading: what else decides the grades, such as the grader's version.

    Raises:
        ValueError: a value is out of range.
    """

    task: Task
    config: ReSETConfig
    n_samples: int = 8
    seed: int = 0
    max_tokens: int | None = None
    top_p: float = 0.95
    min_p: float = 0.0
    prompt: PromptForm = "task"
    system: str | None = None
    grading: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.n_samples < 1:
            raise ValueError(f"n_samples is {self.n_samples}; it must be at least 1")
        if not 0 <= self.seed < 2**31 - self.n_samples:
            raise ValueError(f"seed is {self.seed}; it must be between 0 and 2**31 - n_samples")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p is {self.min_p}; it must be at least 0 and below 1")

    @property
    def seeds(self) -> list[int]:
        return [self.seed + number for number in range(self.n_samples)]

    def request(self, problem: Problem, sample: int) -> Request:
        """The request of one sample; it depends on the plan, the problem and the number alone."""
        return Request(
            messages=messages(problem, self.prompt, self.system),
            seed=request_seed(self.seed + sample, problem.id),
            config=self.config,
            max_tokens=self.max_tokens or self.task.max_tokens,
            top_p=self.top_p,
            min_p=self.min_p,
        )

    def settings(self, engine: Engine) -> dict[str, Any]:
        """Everything that decides the scores, plain values."""
        return {
            "task": self.task.name,
            "task_sha256": self.task.sha256,
            "task_sources": list(self.task.sources),
            "problems": len(self.task.problems),
            "policy": self.config.to_dict(),
            "n_samples": self.n_samples,
            "seeds": self.seeds,
            "max_tokens": self.max_tokens or self.task.max_tokens,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "prompt_form": self.prompt,
            "prompt_templates": sorted(
                {template(problem, self.prompt) for problem in self.task.problems}
            ),
            "system": self.system,
            "grading": {**self.grading, "reset-decoding": reset.__version__},
            "engine": engine.describe(),
        }


def request_seed(seed: int, problem_id: str) -> int:
    """The seed of one answer: problems share no random numbers, runs with one `seed` share all."""
    digest = hashlib.sha256(f"{seed}:{problem_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def run(
    plan: RunPlan,
    engine: Engine,
    grade: Grader,
    output: Path,
    *,
    resume: bool = False,
    on_progress: Progress | None = None,
) -> Report:
    """Decode and grade what is missing in `output`, then report over all of it.

    A sample is graded once, when it comes; a run that goes on only asks for those that are missing.

    Raises:
        ValueError: the folder cannot be used (`RunFolder`), or the output is degenerate: more than
            half of the first 20 answers, or 5 % of all.
        OSError: the engine gave up, or the disk is full; what came before is kept.
    """
    problems = {problem.id: problem for problem in plan.task.problems}
    rows = [_problem_row(plan, engine, problem) for problem in plan.task.problems]
    with RunFolder(output, plan.settings(engine), rows, resume=resume) as folder:
        _first_look(folder)  # a run that was stopped here is stopped again when it goes on
        done = {(sample["problem_id"], sample["sample"]) for sample in folder.samples}
        wanted = [
            (name, number)
            for number in range(plan.n_samples)
            for name in problems
            if (name, number) not in done
        ]
        requests = [plan.request(problems[name], number) for name, number in wanted]
        total = len(problems) * plan.n_samples
        tokens = 0
        if on_progress is not None:
            on_progress(len(done), total, 0)
        began = time.monotonic()
        for position, answer in engine.generate(requests) if requests else ():
            seconds = time.monotonic() - began
            name, number = wanted[position]
            grade_of = graded(answer, problems[name], grade)
            folder.append(
                {
                    "problem_id": name,
                    "sample": number,
                    "seed": requests[position].seed,
                    **asdict(answer),
                    "correct": bool(grade_of.correct),
                    "extracted": grade_of.extracted,
                    "detail": grade_of.detail,
                    "at": time.time(),
                    "session_seconds": seconds,
                }
            )
            tokens += answer.tokens
            if len(folder.samples) == _FIRST_LOOK:
                _first_look(folder)
            if on_progress is not None:
                on_progress(len(folder.samples), total, tokens)
        report = make_report(folder.samples, list(problems), plan.n_samples)
        folder.write_results(report.to_dict(), speed(folder.samples))
    return report


def _first_look(folder: RunFolder) -> None:
    if len(folder.samples) >= _FIRST_LOOK:
        refuse_degenerate(folder.samples[:_FIRST_LOOK], _HOPELESS)


def graded(answer: Answer, problem: Problem, grade: Grader) -> Graded:
    """The grade of an answer; where several answers are right, the first that fits counts."""
    if problem.kind != "integer":
        return grade(answer, problem)
    grades = [grade(answer, replace(problem, answer=one)) for one in problem.answer.split(OR)]
    return next((one for one in grades if one.correct), grades[0])


def _problem_row(plan: RunPlan, engine: Engine, problem: Problem) -> dict[str, Any]:
    request = plan.request(problem, 0)
    row = asdict(problem)
    row.pop("tests")  # hidden tests are megabytes, and the task's checksum covers them
    return {**row, "messages": request.chat(), "prompt": engine.render(request)}
