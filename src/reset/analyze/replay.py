"""What the product's own policy makes of recorded entropies, and what an oracle would say.

The estimates come from `reset.policy`, fed with a record as a decoding would feed it; nothing is
computed here a second time. Knows records, not files or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from reset.analyze.dump import AnswerRecord
from reset.config import ReSETConfig
from reset.policy import TemperaturePolicy

PERCENTILE_RULE = "numpy linear, all tokens of all answers pooled"


@dataclass(frozen=True)
class Replayed:
    """float64 [T] each, in nats: what the policy knew before each token."""

    step_entropy: np.ndarray
    mean_entropy: np.ndarray


def replay(answers: Sequence[AnswerRecord], configs: Sequence[ReSETConfig]) -> list[list[Replayed]]:
    """Run policies over recorded answers.

    Args:
        answers: all advance together; memory is 16 bytes per token of the longest, answer and
            configuration.
        configs: policies to run.

    Returns:
        [configuration][answer].
    """
    lengths = [len(answer) for answer in answers]
    longest, rows = max(lengths), len(answers) * len(configs)
    entropy = torch.zeros((longest, len(answers)))
    new_step = torch.zeros((longest, len(answers)), dtype=torch.bool)
    for row, answer in enumerate(answers):
        entropy[: len(answer), row] = torch.from_numpy(answer.entropy_nats)
        new_step[1 : len(answer), row] = torch.from_numpy(answer.ends_step[:-1])
    widest = max(config.window for config in configs)
    policy = TemperaturePolicy(configs[0], slots=rows, max_window=widest)
    for number, config in enumerate(configs):
        first = number * len(answers)
        policy.configure(config, list(range(first, first + len(answers))))
    estimates = np.empty((2, longest, rows))
    for position in range(longest):
        decision = policy.decide(
            entropy[position].repeat(len(configs)), new_step[position].repeat(len(configs))
        )
        estimates[0, position] = decision.step_entropy.numpy()
        estimates[1, position] = decision.mean_entropy.numpy()
    return [
        [
            Replayed(*(estimates[:, :length, number * len(answers) + row]))
            for row, length in enumerate(lengths)
        ]
        for number in range(len(configs))
    ]


def step_means(answer: AnswerRecord) -> np.ndarray:
    """Offline step entropy, float64 [T]: the mean over all tokens of each token's step."""
    sums = np.bincount(answer.step, weights=answer.entropy_nats.astype(np.float64))
    means: np.ndarray = (sums / np.bincount(answer.step))[answer.step]
    return means


def positions_in_step(answer: AnswerRecord) -> np.ndarray:
    """int64 [T]: 0 for the first token of a step."""
    first = np.searchsorted(answer.step, answer.step, side="left")
    return np.arange(len(answer)) - first


def uncertain_steps(answer: AnswerRecord) -> np.ndarray:
    """bool [T], offline: the token's step has a higher mean entropy than its whole answer."""
    return step_means(answer) > answer.entropy_nats.mean(dtype=np.float64)
