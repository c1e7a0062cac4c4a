r"""Long chains of integer arithmetic, worked digit by digit and checked by casting out nines.

    Start with 347. Add 586. Multiply by 7. What is the result?

    347 347          the residue modulo 9 after each digit of the start: 3, 3+4, 3+4+7-9
    <blank line>
    347+586
    7+6=13           digits from the right, the carry as a third term
    4+8+1=13
    3+5+1=9
    =933
    check 541 5+1=6 036 ok

The check holds the running residues of the second operand, the residue that the result must have,
and the running residues of the result. A digit that went wrong shows as a mismatch ("wrong"), and
the step is done again. Knows no tokens and no splits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

OPERATIONS = {"+": "Add", "-": "Subtract", "x": "Multiply by"}
_RIGHT, _WRONG = "ok", "wrong"
_MOST_SLIPS = 2


@dataclass(frozen=True)
class ChainDifficulty:
    """What chains look like.

    Args:
        steps: fewest and most operations.
        digits: fewest and most digits of the start and of what is added.
        largest: no value of the chain exceeds it.
        slips: share of steps of a worked solution in which one digit goes wrong at first; there
            are two of them in a solution at most, so that its length is bounded.
    """

    steps: tuple[int, int] = (1, 8)
    digits: tuple[int, int] = (1, 4)
    largest: int = 99_999
    slips: float = 0.04

    def __post_init__(self) -> None:
        for name, (low, high) in (("steps", self.steps), ("digits", self.digits)):
            if not 1 <= low <= high:
                raise ValueError(f"{name} is {low} to {high}; need 1 <= fewest <= most")
        if self.largest < 10 ** self.digits[1]:
            raise ValueError(
                f"largest is {self.largest}, but operands have up to {self.digits[1]} digits; need "
                f"at least {10 ** self.digits[1]}"
            )
        if not 0 <= self.slips < 1:
            raise ValueError(f"slips is {self.slips}; it must be at least 0 and below 1")


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


@dataclass(frozen=True)
class Worked:
    """A worked solution; `slips` are the spans (start, end) of its text that are mistakes."""

    text: str
    slips: tuple[tuple[int, int], ...] = ()


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


def work(chain: Chain, draw: random.Random, slips: float = 0.0) -> Worked:
    """The solution, step by step; with probability `slips` a step goes wrong first, up to twice."""
    text = _Text()
    text.add(f"{chain.start} {residues(chain.start)}\n\n")
    value = chain.start
    for sign, operand in chain.operations:
        if draw.random() < slips and len(text.slips) < _MOST_SLIPS:
            _step(text, value, sign, operand, draw)
        _step(text, value, sign, operand, None)
        value = applied(value, sign, operand)
    text.add(f"\\boxed{{{value}}}")
    return Worked("".join(text.parts), tuple(text.slips))


def residues(value: int) -> str:
    """The residue modulo 9 of the digit sum after each digit, e.g. 347 -> "375"."""
    total, found = 0, []
    for digit in str(value):
        total = (total + int(digit)) % 9
        found.append(str(total))
    return "".join(found)


class _Text:
    """A text that grows, and where it is wrong."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.length = 0
        self.slips: list[tuple[int, int]] = []

    def add(self, part: str, wrong_at: int | None = None) -> None:
        """`wrong_at` is the index in `part` of the one character that is wrong."""
        if wrong_at is not None:
            self.slips.append((self.length + wrong_at, self.length + wrong_at + 1))
        self.parts.append(part)
        self.length += len(part)


def _step(text: _Text, value: int, sign: str, operand: int, slip: random.Random | None) -> None:
    """One operation with its check; `slip` makes one digit wrong."""
    text.add(f"{value}{sign}{operand}\n")
    columns = max(len(str(value)), len(str(operand))) if sign != "x" else len(str(value))
    # A slip happens in a column, or when the result is put together.
    slips_at = slip.randint(0, columns) if slip is not None else None
    low: list[str] = []  # digits of the result from the right
    carry = 0
    for column in range(columns):
        total, carry, work_of = _column(value, sign, operand, column, carry, column + 1 == columns)
        digits = str(total)
        wrong_at = None
        if slips_at == column and slip is not None:
            digits = digits[:-1] + _other_digit(digits[-1], slip)
            wrong_at = len(work_of) + len(digits)
        text.add(f"{work_of}={digits}\n", wrong_at)
        low.append(digits if column + 1 == columns else digits[-1])
    found = "".join(reversed(low)).lstrip("0") or "0"
    if slips_at == columns and slip is not None:
        place = slip.randrange(len(found))
        changed = _other_digit(found[place], slip, barred="0" if place == 0 else "")
        found = found[:place] + changed + found[place + 1 :]
        text.add(f"={found}\n", 1 + place)
    else:
        text.add(f"={found}\n")
    due = applied(value, sign, operand) % 9
    verdict = _RIGHT if int(found) % 9 == due else _WRONG
    text.add(
        f"check {residues(operand)} {value % 9}{sign}{operand % 9}={due} {residues(int(found))} "
        f"{verdict}\n\n"
    )


def _column(
    value: int, sign: str, operand: int, column: int, carry: int, is_last: bool
) -> tuple[int, int, str]:
    """(what is written, carry to the left, the sum as text) of one column from the right."""
    one = value // 10**column % 10
    if sign == "x":
        total = one * operand + carry
        told = f"{one}x{operand}" + (f"+{carry}" if carry else "")
        return total, total // 10, told
    two = operand // 10**column % 10
    if sign == "+":
        total = one + two + carry
        told = f"{one}+{two}" + (f"+{carry}" if carry else "")
        return total, total // 10, told
    total = one - two - carry
    told = f"{one}-{two}" + (f"-{carry}" if carry else "")
    if total < 0 and not is_last:
        return total + 10, 1, f"{told}+10"
    return total, 0, told


def _other_digit(digit: str, draw: random.Random, barred: str = "") -> str:
    """Another digit with another residue modulo 9, so that a check can see it."""
    same = "09" if digit in "09" else digit
    return draw.choice([other for other in "0123456789" if other not in same + barred])


def _number(draw: random.Random, difficulty: ChainDifficulty) -> int:
    digits = draw.randint(*difficulty.digits)
    return draw.randint(10 ** (digits - 1), 10**digits - 1)


def _operation(draw: random.Random, difficulty: ChainDifficulty, value: int) -> tuple[str, int]:
    """One that keeps the value in range; something can always be added or subtracted."""
    while True:
        sign = draw.choice("++--x")
        operand = draw.randint(2, 9) if sign == "x" else _number(draw, difficulty)
        if 0 <= applied(value, sign, operand) <= difficulty.largest:
            return sign, operand
        # From 0 there is no way but up, from the top none but down: both are drawn soon.
