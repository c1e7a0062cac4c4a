r"""Long chains of integer arithmetic, computed in the head: every result at once.

    Start with 347. Add 586. Multiply by 27. What is the result?

    347
    <blank line>
    347+586=933      highest digit first: no carries are written down
    <blank line>
    933x27=25191
    <blank line>
    \boxed{25191}

Nothing is checked and nothing is done again: a wrong digit is carried on to the end. So the share
of right answers shows every mistake. Knows no tokens and no splits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

OPERATIONS = {"+": "Add", "-": "Subtract", "x": "Multiply by"}


@dataclass(frozen=True)
class ChainDifficulty:
    """What chains look like.

    Args:
        steps: fewest and most operations.
        digits: fewest and most digits of the start and of what is added.
        factors: smallest and largest number to multiply by.
        largest: no value of the chain exceeds it.
    """

    steps: tuple[int, int] = (1, 16)
    digits: tuple[int, int] = (1, 5)
    factors: tuple[int, int] = (2, 99)
    largest: int = 999_999

    def __post_init__(self) -> None:
        for name, (low, high) in (
            ("steps", self.steps),
            ("digits", self.digits),
            ("factors", self.factors),
        ):
            if not 1 <= low <= high:
                raise ValueError(f"{name} is {low} to {high}; need 1 <= least <= most")
        if self.largest < 10 ** self.digits[1]:
            raise ValueError(
                f"largest is {self.largest}, but operands have up to {self.digits[1]} digits; need "
                f"at least {10 ** self.digits[1]}"
            )


@dataclass(frozen=True)
class Chain:
    """A start and the operations on it, in order: (sign, operand). Values never fall below 0."""

    start: int
    operations: tuple[tuple[str, int], ...]

    @property
    def question(self) -> str:
        told = " ".join(f"{OPERATIONS[sign]} {operand}." for sign, operand in self.operations)
        return f"Start with {self.start}. {told} What is the result?"

    @property
    def values(self) -> list[int]:
        """The start and the value after each operation."""
        values = [self.start]
        for sign, operand in self.operations:
            values.append(applied(values[-1], sign, operand))
        return values

    @property
    def answer(self) -> int:
        return self.values[-1]


def applied(value: int, sign: str, operand: int) -> int:
    """`value` (sign) `operand`."""
    if sign == "+":
        return value + operand
    return value - operand if sign == "-" else value * operand


def make_chain(draw: random.Random, difficulty: ChainDifficulty) -> Chain:
    """A random chain. Every value is within 0 .. `difficulty.largest`."""
    value = start = _number(draw, difficulty)
    operations = []
    for _ in range(draw.randint(*difficulty.steps)):
        sign, operand = _operation(draw, difficulty, value)
        value = applied(value, sign, operand)
        operations.append((sign, operand))
    return Chain(start, tuple(operations))


def work(chain: Chain) -> str:
    """The solution, step by step."""
    value = chain.start
    steps = [str(value)]
    for sign, operand in chain.operations:
        result = applied(value, sign, operand)
        steps.append(f"{value}{sign}{operand}={result}")
        value = result
    steps.append(f"\\boxed{{{value}}}")
    return "\n\n".join(steps)


def _number(draw: random.Random, difficulty: ChainDifficulty) -> int:
    digits = draw.randint(*difficulty.digits)
    return draw.randint(10 ** (digits - 1), 10**digits - 1)


def _operation(draw: random.Random, difficulty: ChainDifficulty, value: int) -> tuple[str, int]:
    """One that keeps the value in range; something can always be added or subtracted."""
    while True:
        sign = draw.choice("++--x")
        operand = draw.randint(*difficulty.factors) if sign == "x" else _number(draw, difficulty)
        if 0 <= applied(value, sign, operand) <= difficulty.largest:
            return sign, operand
        # From 0 there is no way but up, from the top none but down: both are drawn soon.
