"""Chains: the questions say what is to be done, and every result of the work is right."""

from __future__ import annotations

import random
import re

import pytest
from lab.pocket_reasoner.arithmetic import Chain, ChainDifficulty, make_chain, work

WORKED = r"""347

347+86=433

433x17=7361

7361-32=7329

\boxed{7329}"""


def chains(count, **difficulty):
    draw = random.Random(7)
    return [make_chain(draw, ChainDifficulty(**difficulty)) for _ in range(count)]


def told_operations(question):
    """The start of a question and its operations, read from its text."""
    signs = {"Add": "+", "Subtract": "-", "Multiply by": "x"}
    told = re.findall(r"(Add|Subtract|Multiply by) (\d+)\.", question)
    start = int(re.match(r"Start with (\d+)\.", question)[1])
    return start, [(signs[verb], int(operand)) for verb, operand in told]


def test_a_chain_worked_by_hand():
    chain = Chain(347, (("+", 86), ("x", 17), ("-", 32)))
    assert chain.question == (
        "Start with 347. Add 86. Multiply by 17. Subtract 32. What is the result?"
    )
    assert work(chain) == WORKED


def test_every_line_of_a_solution_is_right():
    for chain in chains(400):
        value, operations = told_operations(chain.question)
        first, *steps, box = work(chain).split("\n\n")
        assert first == str(value)
        for step, (sign, operand) in zip(steps, operations, strict=True):
            before = value
            value = {"+": before + operand, "-": before - operand, "x": before * operand}[sign]
            assert step == f"{before}{sign}{operand}={value}"
        assert box == f"\\boxed{{{value}}}"
        assert chain.answer == value


def test_values_stay_in_range_and_lengths_as_asked():
    found = chains(500, steps=(3, 5), digits=(2, 3), factors=(3, 12), largest=5000)
    assert all(0 <= value <= 5000 for chain in found for value in chain.values)
    assert {len(chain.operations) for chain in found} == {3, 4, 5}
    assert {sign for chain in found for sign, _ in chain.operations} == {"+", "-", "x"}
    factors = {factor for chain in found for sign, factor in chain.operations if sign == "x"}
    assert factors == set(range(3, 13))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": (0, 3)}, "steps is 0 to 3"),
        ({"digits": (3, 2)}, "digits is 3 to 2"),
        ({"factors": (0, 9)}, "factors is 0 to 9"),
        ({"largest": 999}, "largest is 999, .* at least 10000"),
    ],
)
def test_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        ChainDifficulty(**wrong)
