"""What a training wrote down beside its model, read back: how hard its problems were, and how many
of them it solved. Knows training.json; loads no model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.pocket_reasoner.arithmetic import ChainDifficulty
from lab.pocket_reasoner.problems import FAMILIES, Difficulty, Family
from lab.pocket_reasoner.search import SearchDifficulty

FACTS_FILE = "training.json"


@dataclass(frozen=True)
class Trained:
    """Of one model.

    Args:
        difficulty: of the problems that it was trained and measured on.
        problems: calibration problems of each family that `accuracy` is of: the first so many of
            `make_problems(family, "calibration", ..., difficulty=difficulty)`.
        max_tokens: of an answer there.
        accuracy: share solved greedily, 0 .. 1, by family.
    """

    difficulty: Difficulty
    problems: int
    max_tokens: int
    accuracy: dict[Family, float]


def read_trained(folder: Path) -> Trained:
    """The facts of a model folder that train.py made, or of a quantised copy of it.

    Raises:
        ValueError: training.json is of another make.
        OSError: there is none.
    """
    path = folder / FACTS_FILE
    facts = json.loads(path.read_text(encoding="utf-8"))
    try:
        values, training = facts["difficulty"], facts["training"]
        return Trained(
            difficulty=Difficulty(
                chain=ChainDifficulty(**_tuples(values["chain"])),
                search=SearchDifficulty(**_tuples(values["search"])),
                chain_share=values["chain_share"],
            ),
            problems=training["problems"],
            max_tokens=training["max_tokens"],
            accuracy={family: facts["calibration_accuracy"][family] for family in FAMILIES},
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: is not as lab.pocket_reasoner.train writes it ({error}); train again, or "
            "take the file of the model"
        ) from error


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no tuples."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
