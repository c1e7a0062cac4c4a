"""What tests ask the pocket reasoner, and how many right answers they expect.

Held-out problems: the first of the calibration problems that the training measured the model on.
What it solved of those is in its training.json, in the arithmetic of the machine that trained it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from lab.pocket_reasoner.decode import BatchEngine
from lab.pocket_reasoner.grading import as_task_problem, grade
from lab.pocket_reasoner.problems import FAMILIES, make_problems
from lab.pocket_reasoner.trained import read_trained

from reset.config import ReSETConfig
from reset.evaluate.engines import Request
from reset.evaluate.problems import Answer, Problem

COUNT = 12
"""Problems of each family."""

SAME = (0, 1, 2, COUNT, COUNT + 1, COUNT + 2)
"""Of `questions`, those whose texts are compared: three of each family."""

COST = 0.04
"""Share of the problems that W4A16 may cost: the study's interval of the greedy difference ends at
3.7 points (docs/accuracy.md)."""

MAX_TOKENS = 448
"""Of an answer. Of the worked solutions 1 in 2,000 searches is longer; an answer that is goes in
circles as a rule, and the training counted it as wrong at 640."""

GREEDY = ReSETConfig(policy="fixed", base_temp=0.0)


def questions(pocket: Path) -> list[Problem]:
    """`COUNT` problems of each family, as hard as those of the training."""
    difficulty = read_trained(pocket).difficulty
    return [
        as_task_problem(one)
        for family in FAMILIES
        for one in make_problems(family, "calibration", COUNT, difficulty=difficulty)
    ]


def floors(pocket: Path, cost: float = 0.0) -> dict[str, int]:
    """Right answers to expect of greedy decoding, by family: three deviations below the mean.

    A share p of `COUNT` problems drawn at random varies by sqrt(p (1 - p) / COUNT). p is what the
    training measured, less `cost`; it is from few problems itself, so that it is taken with one
    more right and one more wrong (Laplace).
    """
    facts = read_trained(pocket)
    found = {}
    for family, accuracy in facts.accuracy.items():
        p = (accuracy * facts.problems + 1) / (facts.problems + 2) - cost
        lowest = COUNT * p - 3 * math.sqrt(COUNT * p * (1 - p))
        found[family] = math.ceil(lowest)
        assert found[family] > 0, "so few problems show nothing"
    return found


def right(pocket: Path, answers: Mapping[int, Answer]) -> dict[str, int]:
    """How many of `questions` were answered rightly, by family."""
    asked = questions(pocket)
    assert sorted(answers) == list(range(len(asked)))
    counts = dict.fromkeys(FAMILIES, 0)
    for number, problem in enumerate(asked):
        counts[problem.source] += grade(answers[number], problem).correct
    return counts


def requests(pocket: Path) -> list[Request]:
    """`questions`, greedily."""
    return [Request((("user", one.question),), 0, GREEDY, MAX_TOKENS) for one in questions(pocket)]


def batched(pocket: Path, model: Path) -> dict[int, Answer]:
    """Answers of the lab's own decoder to the questions `SAME`, float32."""
    engine = BatchEngine.load(model, rows=len(SAME))
    asked = requests(pocket)
    found = dict(engine.generate([asked[number] for number in SAME]))
    return {number: found[place] for place, number in enumerate(SAME)}
