"""Searches: moves and reachability against brute force, traces line by line."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from lab.pocket_reasoner.search import (
    LARGEST,
    Search,
    SearchDifficulty,
    make_search,
    moves,
    reachable,
    trace,
)

from reset.evaluate.graders.target import target_fault


def combined(one, two):
    """Every result of two different numbers, with the rules written out again."""
    large, small = max(one, two), min(one, two)
    found = {("+", one + two), ("-", large - small)}
    if small > 1:
        found.add(("x", one * two))
        if large % small == 0:
            found.add(("/", large // small))
    return {(sign, value) for sign, value in found if 0 < value <= LARGEST}


def brute_force(numbers, target):
    if target in numbers:
        return True
    for one, two in itertools.combinations(numbers, 2):
        rest = [number for number in numbers if number not in (one, two)]
        for _, value in combined(one, two):
            if value not in numbers and brute_force([*rest, value], target):
                return True
    return False


def problems(count, **difficulty):
    draw = random.Random(11)
    return [make_search(draw, SearchDifficulty(**difficulty)) for _ in range(count)]


def test_moves_are_all_there_are():
    for numbers in ((2, 3, 4), (1, 5), (6, 7, 42, 290)):
        expected = {
            (sign, value)
            for one, two in itertools.combinations(numbers, 2)
            for sign, value in combined(one, two)
            if value not in numbers
        }
        assert {(move.sign, move.result) for move in moves(numbers)} == expected
        for move in moves(numbers):
            assert list(move.after) == sorted(set(move.after))
            assert len(move.after) == len(numbers) - 1


def test_reachable_agrees_with_brute_force():
    draw = random.Random(2)
    for _ in range(150):
        numbers = tuple(sorted(draw.sample(range(1, 16), 3)))
        target = draw.randint(10, 60)
        assert reachable(numbers, target) == brute_force(list(numbers), target)


def test_problems_can_be_solved_and_are_as_asked():
    for problem in problems(200, numbers=(3, 4), largest=12, target=(20, 50)):
        assert len(problem.numbers) in (3, 4)
        assert list(problem.numbers) == sorted(set(problem.numbers))
        assert max(problem.numbers) <= 12
        assert 20 <= problem.target <= 50
        assert problem.target not in problem.numbers
        assert reachable(problem.numbers, problem.target)
    assert Search((3, 7, 8), 29).question == "Use 3, 7, 8 to make 29."


@pytest.mark.parametrize("count", [2, 3, 4])
def test_traces_are_exact_and_end_with_a_right_expression(count):
    draw = random.Random(4)
    difficulty = SearchDifficulty(numbers=(count, count), insight=0.3)
    dead_ends = 0
    for problem in problems(200, numbers=(count, count)):
        first, *lines, box = trace(problem, draw, difficulty).split("\n\n")
        state, target = problem.numbers, problem.target
        assert first == f"{' '.join(map(str, state))} for {target}"
        visited = {state}
        for line in lines:
            state = next_state(line, state, target, visited)
            visited.add(state)
            dead_ends += line.startswith("back")
        assert target in state
        expression = re.fullmatch(r"\\boxed\{(.*)\}", box)[1]
        assert target_fault(expression, list(problem.numbers), target) is None
    assert (dead_ends > 20) == (count == 4)


def next_state(line, state, target, visited):
    """The numbers after a line of a trace; raises if the line is not true."""
    if line.startswith("back "):
        back = tuple(map(int, line.split()[1:]))
        assert back in visited
        return back
    told, _, after = line.partition(", ")
    left, sign, right, result, verdict = re.fullmatch(
        r"(\d+)([-+x/])(\d+)=(\d+)( yes)?", told
    ).groups()
    known = {number for number in map(int, (left, right))}
    if not known <= set(state):  # tried at the place before the last attempt
        state = next(v for v in visited if len(v) == len(state) + 1 and known <= set(v))
    assert (sign, int(result)) in combined(int(left), int(right))
    reached = tuple(sorted((set(state) - known) | {int(result)}))
    assert bool(verdict) == (int(result) == target)
    if after:
        numbers, _, rest = after.partition(": ")
        assert tuple(map(int, numbers.split())) == reached
        if len(reached) == 2:
            *results, said = rest.split()
            assert list(map(int, results)) == [move.result for move in moves(reached)]
            assert said == ("yes" if str(target) in results else "no")
            return reached if said == "yes" else state
    return reached


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"numbers": (1, 3)}, r"numbers is \(1, 3\)"),
        ({"target": (10, 999)}, r"target is \(10, 999\)"),
        ({"largest": 4}, "largest is 4"),
        ({"insight": 0.0}, "insight is 0.0"),
        ({"patience": 0}, "patience 0"),
    ],
)
def test_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        SearchDifficulty(**wrong)
