r"""Number-target search: combine given numbers with + - x / to hit a target, as a search trace.

    Use 1, 20, 23, 25 to make 78.

    1 20 23 25 for 78
    <blank line>
    1+23=24, 20 24 25              an attempt, and what is there after it
    <blank line>
    24+25=49, 20 49: 69 29 no      the last two numbers: all that they make, and a verdict
    <blank line>
    back 1 20 23 25                a dead end: from these numbers again
    <blank line>
    1+25=26, 20 23 26
    <blank line>
    23-20=3, 3 26: 29 23 78 yes
    <blank line>
    3x26=78 yes
    <blank line>
    \boxed{(23-20)x(1+25)}

A trace shows the search of somebody who often guesses well: at numbers that lead to the target an
attempt is a good one with a probability, else any; after a few bad attempts the good one follows.
At numbers that lead nowhere it gives up after a few. Numbers are positive integers throughout, and
each may be used at most once. Knows no tokens and no splits; grading.py checks answers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

Numbers = tuple[int, ...]

LARGEST = 300
"""No result on the way exceeds it."""

_LONGEST = 20
"""After so many steps of a trace every attempt is a good one, so that its length is bounded."""


@dataclass(frozen=True)
class SearchDifficulty:
    """What search problems look like.

    Args:
        numbers: fewest and most numbers given.
        largest: of the numbers given.
        target: smallest and largest target.
        insight: how likely an attempt at numbers that lead to the target is a good one.
        patience: bad attempts at one place, at most, before the good one, or before giving up.
    """

    numbers: tuple[int, int] = (3, 4)
    largest: int = 25
    target: tuple[int, int] = (10, 99)
    insight: float = 0.6
    patience: int = 3

    def __post_init__(self) -> None:
        if not 2 <= self.numbers[0] <= self.numbers[1] <= 6:
            raise ValueError(f"numbers is {self.numbers}; need 2 <= fewest <= most <= 6")
        if not 1 <= self.target[0] <= self.target[1] <= LARGEST:
            raise ValueError(f"target is {self.target}; need 1 <= smallest <= largest <= {LARGEST}")
        if not self.numbers[1] < self.largest <= LARGEST:
            raise ValueError(
                f"largest is {self.largest}; need more than {self.numbers[1]} different numbers, "
                f"and at most {LARGEST}"
            )
        if not 0 < self.insight <= 1 or self.patience < 1:
            raise ValueError(
                f"insight is {self.insight} and patience {self.patience}; need 0 < insight <= 1 "
                "and patience >= 1"
            )


@dataclass(frozen=True)
class Search:
    """Different numbers, in rising order, and what to make of some or all of them."""

    numbers: Numbers
    target: int

    @property
    def question(self) -> str:
        return f"Use {', '.join(map(str, self.numbers))} to make {self.target}."


@dataclass(frozen=True)
class Move:
    """Two numbers combined: `left` sign `right` = `result`, and what is there afterwards."""

    left: int
    sign: str
    right: int
    result: int
    after: Numbers

    def __str__(self) -> str:
        return f"{self.left}{self.sign}{self.right}={self.result}"


@lru_cache(maxsize=65_536)
def moves(numbers: Numbers) -> tuple[Move, ...]:
    """Every combination of two of `numbers` (rising, all different) that makes a new number.

    Sums, differences, products and whole quotients, 1 to `LARGEST`; no factor or divisor 1, and no
    result that is one of `numbers`, so that they stay different.
    """
    found = {}
    for i, small in enumerate(numbers):
        for j in range(i + 1, len(numbers)):
            large = numbers[j]
            rest = (*numbers[:i], *numbers[i + 1 : j], *numbers[j + 1 :])
            for one, sign, two, result in _results(small, large):
                if result not in numbers:
                    after = tuple(sorted((*rest, result)))
                    found[one, sign, two] = Move(one, sign, two, result, after)
    return tuple(found.values())


def _results(small: int, large: int) -> Iterator[tuple[int, str, int, int]]:
    if small + large <= LARGEST:
        yield small, "+", large, small + large
    if large > small:
        yield large, "-", small, large - small
    if small > 1:
        if small * large <= LARGEST:
            yield small, "x", large, small * large
        if large % small == 0:
            yield large, "/", small, large // small


@lru_cache(maxsize=262_144)
def reachable(numbers: Numbers, target: int) -> bool:
    """True if some or all of `numbers` can be combined into `target`."""
    return target in numbers or any(reachable(move.after, target) for move in moves(numbers))


def make_search(draw: random.Random, difficulty: SearchDifficulty) -> Search:
    """A random problem that can be solved; the target is the result of random moves."""
    low, high = difficulty.target
    while True:
        count = draw.randint(*difficulty.numbers)
        numbers = tuple(sorted(draw.sample(range(1, difficulty.largest + 1), count)))
        state = numbers
        while len(state) > 1 and (options := moves(state)):
            state = draw.choice(options).after
        if len(state) == 1 and low <= state[0] <= high and state[0] not in numbers:
            return Search(numbers, state[0])


def trace(problem: Search, draw: random.Random, difficulty: SearchDifficulty) -> str:
    """A search for the target, ending with the expression that makes it."""
    lines = [f"{_told(problem.numbers)} for {problem.target}"]
    expressions = {number: str(number) for number in problem.numbers}
    state = problem.numbers
    while problem.target not in state:
        move = _search(state, problem.target, draw, difficulty, lines)
        expressions[move.result] = _expression(move, expressions)
        state = move.after
    lines.append(f"\\boxed{{{expressions[problem.target]}}}")
    return "\n\n".join(lines)


def _search(
    state: Numbers, target: int, draw: random.Random, difficulty: SearchDifficulty, lines: list[str]
) -> Move:
    """Attempts at a place that leads to the target; ends with a good one, which is returned."""
    good = [move for move in moves(state) if reachable(move.after, target)]
    bad = [move for move in moves(state) if not reachable(move.after, target)]
    draw.shuffle(bad)
    # With two numbers left, the line before lists what they make: there is nothing to guess.
    for move in bad[: difficulty.patience] if len(state) > 2 else ():
        if draw.random() < difficulty.insight or len(lines) >= _LONGEST:
            break
        _attempt(move, target, lines)
        if len(move.after) > 2:
            _give_up(move.after, target, draw, difficulty, lines)
            lines.append(f"back {_told(state)}")
    move = draw.choice(good)
    _attempt(move, target, lines)
    return move


def _give_up(
    state: Numbers, target: int, draw: random.Random, difficulty: SearchDifficulty, lines: list[str]
) -> None:
    """A few attempts at a place that leads nowhere."""
    options = list(moves(state))
    draw.shuffle(options)
    for move in options[: draw.randint(1, difficulty.patience)]:
        if len(lines) >= _LONGEST:
            break
        _attempt(move, target, lines)
        if len(move.after) > 2:
            _give_up(move.after, target, draw, difficulty, lines)
            lines.append(f"back {_told(state)}")


def _attempt(move: Move, target: int, lines: list[str]) -> None:
    """The move; where two numbers are left, what they make and whether that is the target."""
    left = move.after
    if move.result == target:
        lines.append(f"{move} yes")
        return
    if len(left) > 2:
        lines.append(f"{move}, {_told(left)}")
        return
    results = [one.result for one in moves(left)]
    verdict = "yes" if target in results else "no"
    lines.append(f"{move}, {_told(left)}: {' '.join([*map(str, results), verdict])}")


def _expression(move: Move, expressions: dict[int, str]) -> str:
    """The move with its numbers replaced by what made them, in brackets unless given."""
    parts = []
    for number in (move.left, move.right):
        text = expressions[number]
        parts.append(text if text.isdigit() else f"({text})")
    return move.sign.join(parts)


def _told(numbers: Numbers | list[int]) -> str:
    return " ".join(map(str, numbers))
