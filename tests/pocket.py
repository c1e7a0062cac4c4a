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

KEPT = 0.5
"""Share of its floor that the model has to reach in NVFP4. A damaged product solves next to
nothing; what rounding really costs is for the study to say (docs/accuracy.md)."""

GREEDY = ReSETConfig(policy="fixed", base_temp=0.0)


def questions(pocket: Path) -> list[Problem]:
    """`COUNT` problems of each family, as hard as those of the training."""
    difficulty = read_trained(pocket).difficulty
    return [
        as_task_problem(one)
        for family in FAMILIES
        for one in make_problems(family, "calibration", COUNT, difficulty=difficulty)
    ]


def floors(pocket: Path, kept: float = 1.0) -> dict[str, int]:
    """Right answers to expect of greedy decoding, by family: three deviations below the mean.

    A share p of `COUNT` problems drawn at random varies by sqrt(p (1 - p) / COUNT). p itself is
    from few problems, so that it is taken with one more right and one more wrong (Laplace). At
    least one answer has to be right.
    """
    facts = read_trained(pocket)
    found = {}
    for family, accuracy in facts.accuracy.items():
        p = (accuracy * facts.problems + 1) / (facts.problems + 2)
        lowest = COUNT * p - 3 * math.sqrt(COUNT * p * (1 - p))
        found[family] = max(1, math.ceil(kept * lowest))
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
    limit = read_trained(pocket).max_tokens
    return [Request((("user", one.question),), 0, GREEDY, limit) for one in questions(pocket)]


def batched(pocket: Path, model: Path) -> dict[int, Answer]:
    """Answers of the lab's own decoder to the questions `SAME`, float32."""
    engine = BatchEngine.load(model, rows=len(SAME))
    asked = requests(pocket)
    found = dict(engine.generate([asked[number] for number in SAME]))
    return {number: found[place] for place, number in enumerate(SAME)}
