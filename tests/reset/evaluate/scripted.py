"""An engine whose answers follow from the request alone, and a grader that counts its calls."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reset.config import ReSETConfig
from reset.evaluate.engines import Request
from reset.evaluate.problems import Answer, Problem
from reset.evaluate.runner import RunPlan, run
from reset.evaluate.tasks import Task

FIXED = ReSETConfig(policy="fixed", base_temp=0.6)


def scripted_answer(request: Request) -> Answer:
    """Right about two times in three; one in eight is cut off; lengths vary."""
    text = f"{request.seed}|{request.messages}|{request.config}"
    digest = hashlib.sha256(text.encode()).digest()
    value = "7" if digest[0] % 3 else "8"
    length = 3 + digest[1] % 40
    words = " ".join(f"step{digest[2]}x{number}" for number in range(length))
    reason = "length" if digest[3] % 8 == 0 else "stop"
    return Answer(f"{words} answer {value}", reason, length)


@dataclass
class ScriptedEngine:
    """Yields the answers of `script` in an order of its own, so that nothing may rely on it."""

    script: Callable[[Request], Answer] = scripted_answer
    seconds_each: float = 0.0
    fail_after: int | None = None
    asked: list[Request] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        return {"name": "scripted", "versions": {"script": "1"}}

    def render(self, request: Request) -> str:
        return f"<user>{request.messages[-1][1]}</user>"

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        order = [*range(0, len(requests), 2), *range(1, len(requests), 2)]
        for count, position in enumerate(order):
            if count == self.fail_after:
                raise OSError("the endpoint is gone")
            self.asked.append(requests[position])
            time.sleep(self.seconds_each)
            yield position, self.script(requests[position])


@dataclass(frozen=True)
class Mark:
    correct: bool
    extracted: str | None
    detail: str = ""


@dataclass
class WordGrader:
    """The word behind "answer" counts; no such word is unparsed."""

    calls: int = 0

    def __call__(self, answer: Answer, problem: Problem) -> Mark:
        self.calls += 1
        _, found, rest = answer.text.rpartition("answer ")
        if not found:
            return Mark(False, None, "no answer")
        return Mark(rest == problem.answer, rest)


def task(count: int = 6, answer: str = "7") -> Task:
    problems = tuple(
        Problem(f"p{number}", f"What is problem {number}?", "integer", answer)
        for number in range(count)
    )
    return Task("toy", problems, ("made here",), None, 100)


def plan(count: int = 6, **changes: Any) -> RunPlan:
    return RunPlan(task(count), **{"config": FIXED, "n_samples": 3, **changes})


def finished_run(folder: Path, script: Callable[[Request], Answer], **changes: Any) -> Path:
    """A complete run whose answers are those of `script`."""
    run(plan(**changes), ScriptedEngine(script), WordGrader(), folder)
    return folder
