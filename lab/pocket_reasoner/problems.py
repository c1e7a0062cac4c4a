"""The problems of the pocket reasoner: two families, three splits that never overlap.

A problem belongs to the split that the hash of its content names, whoever makes it and when: 95 of
100 are for training, 2 for calibration, 3 for evaluation. A search problem is named by its numbers
and target, so that no other order of the same numbers crosses over. Knows no tokens.

    python -m lab.pocket_reasoner.problems --split evaluation --count 500 > problems.jsonl

prints so many problems of each family as `reset-run --task jsonl` reads them: chains of kind
"integer", searches of kind "target", whose answers are computed, not compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from dataclasses import dataclass, field
from typing import Any, Literal

from lab.pocket_reasoner.arithmetic import Chain, ChainDifficulty, make_chain, work
from lab.pocket_reasoner.search import Search, SearchDifficulty, make_search, trace

Family = Literal["chain", "search"]
Split = Literal["train", "calibration", "evaluation"]
FAMILIES: tuple[Family, ...] = ("chain", "search")
SPLITS: tuple[Split, ...] = ("train", "calibration", "evaluation")

_SHARES = {"calibration": 20, "evaluation": 30}  # of 1000; the rest is for training


@dataclass(frozen=True)
class Difficulty:
    """Of both families; `chain_share` of the training problems are chains."""

    chain: ChainDifficulty = field(default_factory=ChainDifficulty)
    search: SearchDifficulty = field(default_factory=SearchDifficulty)
    chain_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.chain_share <= 1:
            raise ValueError(f"chain_share is {self.chain_share}; it must be between 0 and 1")


TRAINING = Difficulty()
EVALUATION = Difficulty(
    chain=ChainDifficulty(steps=(12, 16), digits=(2, 5)), search=SearchDifficulty(numbers=(4, 4))
)
"""The hard end of what the model is trained on."""


_TRIES = 5000  # the smallest split has 2 of 100: missing it by chance is out of the question


def split_of(problem: Chain | Search) -> Split:
    """The split that a problem belongs to."""
    digest = hashlib.sha256(problem.question.encode()).digest()
    place = int.from_bytes(digest[:8], "big") % 1000
    for split, share in _SHARES.items():
        if place < share:
            return "calibration" if split == "calibration" else "evaluation"
        place -= share
    return "train"


def make_problem(
    family: Family, split: Split, draw: random.Random, difficulty: Difficulty
) -> Chain | Search:
    """A random problem of a family that belongs to `split`.

    Raises:
        ValueError: there seems to be none of this difficulty.
    """
    for _ in range(_TRIES):
        problem: Chain | Search
        if family == "chain":
            problem = make_chain(draw, difficulty.chain)
        else:
            problem = make_search(draw, difficulty.search)
        if split_of(problem) == split:
            return problem
    raise ValueError(
        f"no {family} problem of split {split} among {_TRIES} of this difficulty; ask for a wider "
        "range"
    )


def make_problems(
    family: Family, split: Split, count: int, *, difficulty: Difficulty = EVALUATION, seed: int = 0
) -> list[Chain | Search]:
    """`count` different problems; the same ones for the same arguments.

    Raises:
        ValueError: no such family or split, a count below 1, or so few problems of this difficulty
            that `count` different ones were not found.
    """
    for what, value, legal in (("family", family, FAMILIES), ("split", split, SPLITS)):
        if value not in legal:
            raise ValueError(f"{what} is {value!r}; it must be one of {', '.join(legal)}")
    if count < 1:
        raise ValueError(f"count is {count}; it must be at least 1")
    draw = random.Random(f"{family}/{split}/{seed}")
    found: dict[str, Chain | Search] = {}
    misses = 0
    while len(found) < count:
        problem = make_problem(family, split, draw, difficulty)
        misses = misses + 1 if problem.question in found else 0
        found[problem.question] = problem
        if misses > 500:
            raise ValueError(
                f"only {len(found)} different {family} problems of split {split} were found, but "
                f"{count} were asked for; ask for fewer, or for a wider range of difficulty"
            )
    return list(found.values())


def solution(problem: Chain | Search, draw: random.Random, difficulty: Difficulty) -> str:
    """A worked solution: the one of a chain, one of many of a search."""
    if isinstance(problem, Chain):
        return work(problem)
    return trace(problem, draw, difficulty.search)


def training_example(draw: random.Random, difficulty: Difficulty) -> tuple[str, str]:
    """A question of the training split and a worked solution."""
    family: Family = "chain" if draw.random() < difficulty.chain_share else "search"
    problem = make_problem(family, "train", draw, difficulty)
    return problem.question, solution(problem, draw, difficulty)


def problem_id(problem: Chain | Search) -> str:
    """Name of a problem, made from its content."""
    kind = "chain" if isinstance(problem, Chain) else "search"
    return f"{kind}-{hashlib.sha256(problem.question.encode()).hexdigest()[:12]}"


def task_record(problem: Chain | Search) -> dict[str, Any]:
    """The problem as a line of `reset-run --task jsonl`."""
    record = {"id": problem_id(problem), "question": problem.question}
    if isinstance(problem, Chain):
        return {**record, "kind": "integer", "answer": problem.answer}
    return {**record, "kind": "target", "numbers": problem.numbers, "answer": problem.target}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, help="both if left out")
    parser.add_argument("--split", choices=SPLITS, default="evaluation")
    parser.add_argument("--count", type=int, default=500, help="problems of each family")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for family in (given.family,) if given.family else FAMILIES:
        for problem in make_problems(family, given.split, given.count, seed=given.seed):
            print(json.dumps(task_record(problem)))


if __name__ == "__main__":
    main()
