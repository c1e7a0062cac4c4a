"""A scripted world: requests whose logits and tokens are fixed, and a scheduler that is unkind.

Both stand-ins for vLLM's runners (`runners.py`) are driven by the same steps, and whatever rows,
slots and orders they use, each request must get the temperatures that it gets alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from reset import ReSETConfig, StepDetector
from tests.reset.spec import Request as Specification
from tests.reset.test_entropy import entropy_fp64

VOCABULARY = ["a", "b", "\n", ".\n\n", "c", " ", "\n\n", "d"]
DETECTOR = StepDetector.from_pieces(VOCABULARY)


@dataclass
class Script:
    """A request: what it samples at every position, whatever the runner does in between."""

    name: str
    config: ReSETConfig | None  # None: ReSET is off
    temperature: float
    tokens: list[int]
    logits: torch.Tensor  # [T, V]
    group: str  # requests of one prompt (n > 1) share it

    def expected(self) -> list[float]:
        """The temperature of every position, by the scalar specification."""
        assert self.config is not None
        request = Specification(**self.config.to_dict())
        state, ended = DETECTOR.initial_state(1), False
        temperatures = []
        for token, row in zip(self.tokens, self.logits.double().tolist(), strict=True):
            temperatures.append(request.feed(entropy_fp64(row), ended).temperature)
            state, flag = DETECTOR.advance(state, torch.tensor([token]))
            ended = bool(flag)
        return temperatures


@dataclass
class Step:
    """One engine step. Requests neither scheduled nor named otherwise stay where they are."""

    scheduled: dict[str, bool]  # name -> True if its sample is kept, False for a prefill chunk
    preempted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)  # since the last step


def make_scripts(seed: int) -> dict[str, Script]:
    """Nine requests: single ones with other parameters each, one off, and four of one prompt."""
    generator = torch.Generator().manual_seed(seed)
    picks = random.Random(seed)
    scripts = {}
    for index, group in enumerate(["", "", "", "", "", "four", "four", "four", "four"]):
        length = picks.randint(9, 24)
        config = ReSETConfig(
            t_low=picks.choice([0.1, 0.3]),
            t_high=picks.choice([0.7, 1.0]),
            tau_0=picks.choice([0.5, 1.0]),
            window=picks.choice([2, 3, 8]),
        )
        scale = torch.rand(length, 1, generator=generator) * 5
        scripts[f"r{index}"] = Script(
            name=f"r{index}",
            config=None if index == 2 else config,
            temperature=picks.choice([0.6, 1.0]),
            tokens=[picks.randrange(len(VOCABULARY)) for _ in range(length)],
            logits=torch.randn(length, len(VOCABULARY), generator=generator) * scale,
            group=group or f"alone{index}",
        )
    first = scripts["r5"]
    for name in ("r6", "r7", "r8"):  # one prompt, one set of parameters
        scripts[name].config, scripts[name].temperature = first.config, first.temperature
    return scripts


def drive(runner: Any, seed: int, *, most_rows: int = 4, drop_in_flight: bool = False) -> int:
    """Run all requests of `runner` to their end, unkindly; returns how often one was preempted.

    Args:
        runner: has `scripts`, `kept` (output tokens by name) and `step`.
        drop_in_flight: a preemption may throw away the last token, as async scheduling does.
    """
    picks = random.Random(seed)
    waiting, running = list(runner.scripts), []
    chunks: dict[str, int] = {}
    finished: list[str] = []
    in_flight: dict[str, bool] = {}
    preemptions = 0
    while waiting or running or finished:
        step, finished = Step({}, finished=finished), []
        if running and picks.random() < 0.2:
            name = running.pop(picks.randrange(len(running)))
            if drop_in_flight and in_flight.get(name) and picks.random() < 0.5:
                runner.kept[name] -= 1
            step.preempted.append(name)
            waiting.insert(0, name)
            preemptions += 1
        elif waiting and len(running) < most_rows and picks.random() < 0.6:
            name = waiting.pop(0)
            running.append(name)
            chunks[name] = picks.randint(0, 2)
        arrived = running[-1:] if not step.preempted else []
        for name in running:
            if name not in arrived and picks.random() < 0.15 and len(running) > 1:
                continue  # a pause: it runs, but has no row in this step
            step.scheduled[name] = chunks[name] == 0
            chunks[name] = max(0, chunks[name] - 1)
        runner.step(step)
        in_flight = step.scheduled
        finished = [n for n in running if runner.kept[n] >= len(runner.scripts[n].tokens)]
        running = [name for name in running if name not in finished]
    return preemptions
