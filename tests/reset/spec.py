"""The temperature policy as a scalar float64 program, written from docs/policy.md.

It is the truth for every fast path: one request, one token at a time, means taken over whole lists.
It shares no code with `reset`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


@dataclass
class Token:
    step_entropy: float
    mean_entropy: float
    threshold: float
    temperature: float


@dataclass
class Request:
    t_low: float | None = None
    tau_0: float | None = None
    t_high: float = 1.0
    window: int = 32
    policy: str = "reset"
    estimator: str = "hybrid"
    base_temp: float = 0.6
    history: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    average: float | None = None  # the exponential moving average

    def estimate(self, entropy: float) -> float:
        if not self.history:
            return entropy
        last = mean(self.history[-self.window :])
        if self.estimator == "window":
            return last
        if self.estimator == "causal":
            return mean(self.step) if self.step else entropy
        if self.estimator == "ema":
            assert self.average is not None
            return self.average
        return mean(self.step) if len(self.step) >= self.window else last

    def feed(self, entropy: float, new_step: bool) -> Token:
        if new_step:
            self.step = []
        step_entropy = self.estimate(entropy)
        mean_entropy = mean(self.history) if self.history else step_entropy
        confident = step_entropy <= mean_entropy
        threshold = {
            "reset": self.tau_0 if confident else step_entropy,
            "threshold": self.tau_0,
            "sliding": mean(self.history[-self.window :]) if self.history else entropy,
            "relative": step_entropy,
            "uniform": math.inf if confident else step_entropy,
            "fixed": math.nan,
        }[self.policy]
        if self.policy == "fixed":
            temperature = self.base_temp
        else:
            temperature = self.t_low if entropy < threshold else self.t_high
        self.history.append(entropy)
        self.step.append(entropy)
        weight = 2 / (self.window + 1)
        before = self.average
        self.average = entropy if before is None else before + weight * (entropy - before)
        return Token(step_entropy, mean_entropy, threshold, temperature)
