"""Rows, slots and losses, case by case; test_scripted_batch.py has them all at once."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reset import ReSETConfig
from reset.vllm.log import RequestLog, describe
from reset.vllm.slots import SlotPool, Tracked
from reset.vllm.v1 import Added, Moved, RowTable
from reset.vllm.v2 import SlotTable
from tests.reset.vllm.runners import CPU, FakeV1, FakeV2
from tests.reset.vllm.world import Step, make_scripts

CONFIG = ReSETConfig(t_low=0.1, tau_0=0.5)


def tracked(key, outputs=()) -> Tracked:
    return Tracked(key, CONFIG, 1.0, outputs=outputs)


def table(**pool) -> RowTable:
    return RowTable(SlotPool(**{"running": 3, "parked": 2, **pool}), CPU, list, lambda _: None)


def slots_of(rows: RowTable) -> list[int]:
    layout = rows.layout()
    assert layout is not None
    return layout.slots.tolist()


def test_l4_swap_then_remove_then_move_keeps_every_request_at_its_slot():
    rows = table()
    one, two = tracked("one"), tracked("two")
    rows.update([], [Added(0, one), Added(1, two)], [], 2)
    before = (one.slot, two.slot)
    rows.update([], [], [Moved(0, 1, is_swap=True)], 2)
    assert slots_of(rows) == [two.slot, one.slot]
    rows.update([0], [], [Moved(1, 0, is_swap=False)], 1)
    assert slots_of(rows) == [one.slot]
    assert (one.slot, two.slot) == before


def test_l4_an_added_request_replaces_the_one_in_its_row():
    rows = table()
    left: list[Tracked] = []
    rows._on_leave = left.append
    first, second = tracked("first"), tracked("second")
    rows.update([], [Added(0, first)], [], 1)
    rows.update([], [Added(0, second)], [], 1)
    assert left == [first]
    assert slots_of(rows) == [second.slot]
    assert second.slot != first.slot


def test_a_request_that_leaves_one_row_for_another_in_one_update_is_the_same_request():
    rows = table()
    outputs = [4]
    request, other = tracked("k", outputs), tracked("other")
    rows.update([], [Added(0, other), Added(1, request)], [], 2)
    slot = request.slot
    # Row 1 is taken by another request before the first one is seen to have left it.
    rows.update([0], [Added(0, tracked("k", outputs)), Added(1, tracked("new"))], [], 2)
    assert slots_of(rows)[0] == slot


def test_l1_a_token_known_nowhere_is_an_error_not_a_guess():
    rows = table()
    outputs: list[int] = []
    rows.update([], [Added(0, tracked("k", outputs))], [], 1)
    rows.layout()
    outputs.append(-1)  # async scheduling; and nobody handed over what was sampled
    with pytest.raises(RuntimeError, match=r"output token 0 .* --no-async-scheduling"):
        rows.layout()


def test_positions_of_many_steps_go_on_where_the_prepared_ones_end():
    rows = table()
    outputs: list[int] = []
    rows.update([], [Added(0, tracked("k", outputs))], [], 1)
    for step in range(300):
        layout = rows.layout()
        assert layout.position.tolist() == [step]
        assert step == 0 or layout.token.tolist() == [step - 1]
        rows.sampled(torch.tensor([[step]], dtype=torch.int32))
        outputs.append(-1)


def test_l3_a_history_that_had_to_make_room_is_counted_as_lost():
    """Two places for requests that are away: the third that leaves costs the first its history."""
    scripts = make_scripts(0)
    runner = FakeV1(scripts, is_async=False, parked=0)
    for name in ("r0", "r1", "r3", "r4"):
        for kept in (True, True, True):
            runner.step(Step({name: kept}))
    runner.step(Step({"r0": True}))
    assert runner.losses() == 0  # four places, four requests: r0 still had its own
    runner.step(Step({"r5": True}))
    runner.step(Step({"r1": True}))
    assert runner.losses() == 1


@pytest.mark.parametrize(("second_key", "is_found"), [("four", False), ("other", True)])
def test_l3_v2_gives_no_history_where_two_requests_could_own_it(second_key, is_found):
    """n > 1 without a seed: the key is shared, and equal lengths cannot be told apart."""
    fresh: list[Tracked] = []
    table = SlotTable(SlotPool(running=3, parked=2), 3, CPU, fresh.extend, lambda _: None)
    one, two = tracked("four"), tracked(second_key)
    table.add(0, one, 5, 5)
    table.add(1, two, 5, 5)
    table.flush()
    context = SimpleNamespace(
        idx_mapping_np=np.array([0, 1]),
        seq_lens_upper_bound_np=np.array([8, 8]),  # three outputs each, a fourth under way
        expanded_idx_mapping=torch.tensor([0, 1]),
        pos=torch.tensor([7, 7]),
        input_ids=torch.tensor([0, 0]),
    )
    assert table.layout(context).position.tolist() == [3, 3]
    table.flush()  # a step that runs nothing, as both are preempted
    again = tracked("four")
    table.add(2, again, 5, 9)
    table.flush()
    context.idx_mapping_np = np.array([2])
    context.seq_lens_upper_bound_np = np.array([9])
    context.expanded_idx_mapping = torch.tensor([2])
    context.pos, context.input_ids = torch.tensor([8]), torch.tensor([0])
    (slot,) = table.layout(context).slots.tolist()
    assert (slot == one.slot) == is_found
    assert (again in fresh) == (not is_found)


def test_a_key_of_none_is_never_remembered():
    pool = SlotPool(running=1, parked=1)
    request = tracked(None)
    pool.admit(request)
    pool.leave(request)
    assert request.slot == -1
    assert pool.away(None) == []


class Transfers(TorchDispatchMode):
    """Counts operations that make the host wait, or that bring new data from it."""

    WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.names: list[str] = []  # of all operations

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        self.names.append(name)
        if name in self.WAITING or name in ("_to_copy", "lift_fresh", "copy_"):
            self.calls.append(name)
        return function(*args, **(kwargs or {}))


def test_l8_a_step_of_an_unchanged_batch_neither_waits_nor_moves_bytes():
    """Eight rows, as many steps as are prepared at once."""
    rows = table(running=8)
    outputs: list[list[int]] = [[] for _ in range(8)]
    added = [Added(row, tracked(row, out)) for row, out in enumerate(outputs)]
    rows.update([], added, [], 8)
    sampled = torch.zeros((8, 1), dtype=torch.int32)
    rows.layout()
    with Transfers() as transfers:
        for _ in range(100):
            rows.sampled(sampled)
            for out in outputs:
                out.append(-1)
            assert rows.layout() is not None
    assert transfers.calls == []
    assert transfers.names == ["view"] * 100, "the device has nothing to do"


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_l8_no_step_waits_for_the_device(kind):
    """Arrivals, moves and finishes included; data may come from the host, none may go there."""
    scripts = make_scripts(1)
    runner = FakeV1(scripts, is_async=True) if kind == "v1" else FakeV2(scripts)
    calls: list[str] = []
    layout = runner.table.layout

    def watched(*arguments):
        with Transfers() as transfers:
            result = layout(*arguments)
            if result is not None:
                logits = torch.zeros(len(result.slots), 8)
                runner.tracker.scale(logits, *result)
        calls.extend(transfers.calls)
        return result

    runner.table.layout = watched
    for step in ({"r0": True}, {"r0": True, "r1": False}, {"r1": True, "r0": True}, {"r1": True}):
        runner.step(Step(step))
    assert calls  # the watch saw something
    assert not set(calls) & set(Transfers.WAITING)


def test_the_line_of_a_request_counts_its_last_token_too(caplog):
    scripts = make_scripts(0)
    runner = FakeV1(scripts, is_async=False)
    log = RequestLog(runner.tracker, scratch=runner.pool.count - 1)
    runner.table._on_leave = log.left
    with caplog.at_level(logging.DEBUG, logger="vllm.reset"):
        for _ in range(3):
            runner.step(Step({"r0": True}))
        runner.step(Step({"r1": True}))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("reset: request left, 3 tokens, ")
    assert "history whole" in line


def test_v2_tells_of_a_request_that_is_missing_from_a_step_once_with_all_its_tokens():
    runner = FakeV2(make_scripts(0))
    told: list[tuple[int, int]] = []

    def step(scheduled: dict[str, bool]) -> None:
        runner.table.tell_absent()  # as the processor does at the start of a step
        runner.step(Step(scheduled))

    def left(request: Tracked) -> None:
        if not request.is_told:
            told.append((request.slot, request.next_position))
        request.is_told = True

    runner.table._on_leave = left
    for _ in range(3):
        step({"r0": True, "r1": True})
    for _ in range(3):
        step({"r1": True})
    assert told == [(runner.table._occupants[runner.slot["r0"]].slot, 3)]
    step({"r0": True, "r1": True})  # it was merely not scheduled
    step({"r1": True})
    step({"r1": True})
    assert [tokens for _, tokens in told] == [3, 4]


def test_the_line_in_words():
    assert describe([0, 0, 0, 0, 0]) == "0 tokens"
    assert describe([8, 2, 2, 4.0, 0]) == (
        "8 tokens, 3 steps, 25% at T_high, mean entropy 0.500 nats, history whole"
    )
    assert "history lost 1 time(s), counted since" in describe([8, 2, 2, 4.0, 1])
