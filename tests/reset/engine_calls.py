"""Random calls as a serving engine makes them, for tests of `RequestTracker`.

Requests come and go, rows move, prefills and preemptions repeat positions, drafts are rejected,
now and then a history is lost; every call holds rows that are to be left alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.reset.tracker_spec import PIECES


@dataclass
class Call:
    slots: list[int]
    tokens: list[int]
    positions: list[int]
    groups: list[tuple[int, int, int]]  # (slot, first row, rows) of what is to be advanced


@dataclass
class _Running:
    outputs: list[int] = field(default_factory=list)


def random_calls(seed: int, calls: int, slots: list[int], max_rows: int) -> Iterator[Call]:
    """Calls on admitted `slots`; other slots, -1 and negative positions stand for foreign rows."""
    rng = random.Random(seed)
    running = {slot: _Running() for slot in slots}

    def draw() -> int:
        return rng.randrange(len(PIECES))

    for _ in range(calls):
        call = Call([], [], [], [])
        chosen = rng.sample(slots, rng.randint(1, len(slots)))
        for slot in chosen:
            while rng.random() < 0.3:  # foreign rows, with tokens that are none
                kind = rng.choice([(-1, 3), (-1, -1), (slot, -1), (max(slots) + 1, 5)])
                call.slots.append(kind[0])
                call.positions.append(kind[1])
                call.tokens.append(rng.choice([-1, 10**6, 0]))
            if call.slots and call.slots[-1] == slot:  # a foreign row must not touch its namesake
                call.slots.append(-1)
                call.positions.append(0)
                call.tokens.append(0)
            request = running[slot]
            position = len(request.outputs)
            rows = rng.randint(1, max_rows)
            drafts = [draw() for _ in range(rows - 1)]
            fed = [request.outputs[-1] if position else -1, *drafts]
            call.groups.append((slot, len(call.slots), rows))
            call.slots += [slot] * rows
            call.tokens += fed
            call.positions += range(position, position + rows)
            event = rng.random()
            if event < 0.2:
                continue  # a chunk of a prefill, or to be computed again: nothing is kept
            if event < 0.23:  # drawn somewhere else meanwhile: the next position fits nothing
                request.outputs += [draw() for _ in range(rows + 1)]
                continue
            if event < 0.25 and position > 2:
                del request.outputs[-2:]
                continue
            accepted = rng.randint(0, rows - 1)
            request.outputs += [*drafts[:accepted], draw()]
        yield call
