"""Chains: the work is exact, and slips are found and nothing else is."""

from __future__ import annotations

import random
import re

import pytest
from lab.pocket_reasoner.arithmetic import (
    Chain,
    ChainDifficulty,
    Worked,
    make_chain,
    residues,
    work,
)

WORKED = r"""347 375

347+86
7+6=13
4+8+1=13
3+0+1=4
=433
check 85 5+5=1 471 ok

433x7
3x7=21
3x7+2=23
4x7+2=30
=3031
check 7 1x7=7 3367 ok

3031-32
1-2+10=9
3-3-1+10=9
0-0-1+10=9
3-0-1=2
=2999
check 35 7-5=2 2222 ok

\boxed{2999}"""


def chains(count, **difficulty):
    draw = random.Random(7)
    return [make_chain(draw, ChainDifficulty(**difficulty)) for _ in range(count)]


def follow(question):
    """The result of a question, read from its text."""
    value = int(re.match(r"Start with (\d+)\.", question)[1])
    for verb, operand in re.findall(r"(Add|Subtract|Multiply by) (\d+)\.", question):
        number = int(operand)
        value = {"Add": value + number, "Subtract": value - number, "Multiply by": value * number}[
            verb
        ]
    return value


def step_is_sound(step):
    """Whether every line of one operation is right; raises if a line has another form."""
    header, *columns, result, check = step.split("\n")
    left, sign, right = re.fullmatch(r"(\d+)([-+x])(\d+)", header).groups()
    sums = [re.fullmatch(r"(\d[-+x\d]*)=(\d+)", line).groups() for line in columns]
    sums_hold = all(eval(told.replace("x", "*")) == int(total) for told, total in sums)
    digits = "".join([total[-1] for _, total in sums[:-1]])[::-1]
    joined = int(sums[-1][1] + digits) == int(result[1:])
    wanted = {"+": int(left) + int(right), "-": int(left) - int(right), "x": int(left) * int(right)}
    due = wanted[sign] % 9
    expected = (
        f"check {residues(int(right))} {int(left) % 9}{sign}{int(right) % 9}={due} "
        f"{residues(int(result[1:]))} {'ok' if int(result[1:]) % 9 == due else 'wrong'}"
    )
    assert check == expected
    return sums_hold and joined and int(result[1:]) == wanted[sign]


def test_a_chain_worked_by_hand():
    chain = Chain(347, (("+", 86), ("x", 7), ("-", 32)))
    assert chain.question == (
        "Start with 347. Add 86. Multiply by 7. Subtract 32. What is the result?"
    )
    assert work(chain, random.Random(0)) == Worked(WORKED)


def test_every_line_of_a_solution_is_right():
    for chain in chains(400):
        answer = follow(chain.question)
        assert chain.answer == answer
        text = work(chain, random.Random(0)).text
        first, *steps, box = text.split("\n\n")
        assert first == f"{chain.start} {residues(chain.start)}"
        assert box == f"\\boxed{{{answer}}}"
        assert len(steps) == len(chain.operations)
        assert all(step_is_sound(step) for step in steps)


def test_a_slip_is_one_wrong_digit_that_the_check_finds_and_the_next_step_repairs():
    draw = random.Random(3)
    slips = 0
    for chain in chains(300):
        plain = work(chain, random.Random(0)).text
        worked = work(chain, draw, slips=0.4)
        _, *steps, _ = worked.text.split("\n\n")
        wrong = [step for step in steps if step.endswith("wrong")]
        assert [step_is_sound(step) for step in steps] == [s not in wrong for s in steps]
        assert len(wrong) == len(worked.slips) <= 2
        kept = worked.text
        for step in wrong:
            kept = kept.replace(step + "\n\n", "", 1)
        assert kept == plain
        assert all(worked.text[begin:end].isdigit() for begin, end in worked.slips)
        slips += len(wrong)
    assert slips > 100


def test_the_marked_character_is_the_one_that_is_wrong():
    worked = work(Chain(347, (("+", 86),)), random.Random(1), slips=0.99)
    ((begin, end),) = worked.slips
    right = WORKED.split("\n\n")[1]
    slipped = worked.text.split("\n\n")[1]
    offset = worked.text.index(slipped)
    place = begin - offset
    assert (end, slipped[:place]) == (begin + 1, right[:place])
    assert slipped[place] != right[place]


def test_residues_are_those_of_the_digit_sums():
    assert [residues(n) for n in (0, 9, 347, 99_999)] == ["0", "0", "375", "00000"]


def test_values_stay_in_range_and_lengths_as_asked():
    found = chains(500, steps=(3, 5), digits=(2, 3), largest=5000)
    assert all(0 <= value <= 5000 for chain in found for value in chain.values)
    assert {len(chain.operations) for chain in found} == {3, 4, 5}
    assert {sign for chain in found for sign, _ in chain.operations} == {"+", "-", "x"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": (0, 3)}, "steps is 0 to 3"),
        ({"digits": (3, 2)}, "digits is 3 to 2"),
        ({"largest": 999}, "largest is 999, .* at least 10000"),
        ({"slips": 1.0}, "slips is 1.0"),
    ],
)
def test_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        ChainDifficulty(**wrong)
