"""Batch rows of vLLM's V1 runner: which slot a row has, what position it is at, which token it saw.

The runner moves requests between rows and says so (`BatchUpdate`); it calls the processor for rows
that produce nothing (prefill chunks), and with async scheduling it does not know the last token on
the host. So the output position of a row is the length of its output list, and the last token is
the sampler's own output, kept on the device. Moves permute host lists only: a slot is not a row.
Needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from reset.vllm.slots import SlotPool, Tracked
from reset.vllm.staging import upload

_RAMP = 128  # steps whose positions are prepared at once
_UNKNOWN = -1  # placeholder in an output list under async scheduling


class Added(NamedTuple):
    """A request that enters the batch; `request` is None if ReSET leaves it alone."""

    row: int
    request: Tracked | None


class Moved(NamedTuple):
    """Rows that change: `source` to `target`, or both ways."""

    source: int
    target: int
    is_swap: bool


class Layout(NamedTuple):
    """Arguments of `RequestTracker.scale`, [R] each."""

    slots: Tensor
    token: Tensor
    position: Tensor


class RowTable:
    """Rows of the persistent batch.

    Args:
        pool: slots of the tracker.
        device: of the logits.
        admit: called with requests that start without a history, in one list per update.
        on_leave: called with a request that left the batch.
    """

    def __init__(
        self,
        pool: SlotPool,
        device: torch.device,
        admit: Callable[[list[Tracked]], None],
        on_leave: Callable[[Tracked], None],
    ) -> None:
        self._pool = pool
        self._device = device
        self._admit = admit
        self._on_leave = on_leave
        self._rows: list[Tracked | None] = []
        self._changed = True
        self._asked: list[tuple[Tracked | None, int]] = []  # rows and positions of the last layout
        self._steps = 0  # layouts given since `_asked` was built, less one
        self._sampled: Tensor | None = None  # [R] of the last layout, None until it is known
        self._slots = torch.empty(0)
        self._positions: tuple[Tensor, ...] = ()
        self._ramp = torch.arange(_RAMP, device=device).unsqueeze(1)  # [ramp, 1]

    @property
    def is_empty(self) -> bool:
        """True if no row is ReSET's."""
        return not any(self._rows)

    def update(
        self,
        removed: Iterable[int],
        added: Sequence[Added],
        moved: Sequence[Moved],
        batch_size: int,
    ) -> None:
        """Take in a batch update, in the order removed, added, moved.

        A row that an added or moved request replaces is not listed as removed.
        """
        self._changed = True
        one_way = [move.target for move in moved if not move.is_swap]
        # All of them first: a request may leave one row and enter another in the same update.
        for row in {*removed, *(entry.row for entry in added), *one_way}:
            self._vacate(row)
        rows = [*(entry.row for entry in added), *(n for move in moved for n in move[:2])]
        self._rows += [None] * (max([batch_size, *(n + 1 for n in rows)]) - len(self._rows))
        fresh = []
        for row, request in added:
            if request is None:
                continue
            occupant = self._known(request)
            if occupant is None:
                self._pool.admit(request)
                fresh.append(request)
                occupant = request
            self._rows[row] = occupant
        if fresh:
            self._admit(fresh)
        for source, target, is_swap in moved:
            other = self._rows[target] if is_swap else None
            self._rows[target], self._rows[source] = self._rows[source], other
        del self._rows[batch_size:]

    def _vacate(self, row: int) -> None:
        if row < len(self._rows) and (left := self._rows[row]) is not None:
            left.next_position = len(left.outputs)
            self._rows[row] = None
            self._on_leave(left)
            self._pool.leave(left)

    def _known(self, request: Tracked) -> Tracked | None:
        """The same request from before, if it was in the batch and its slot is still its own."""
        away = self._pool.away(request.key)
        # Requests of one prompt (n > 1) may share the key, but never the list. Under async
        # scheduling a request comes back with a new list.
        found = [one for one in away if one.outputs is request.outputs]
        if request.outputs and not found:
            found = [one for one in away if _may_continue(one.outputs, request.outputs)]
        if len(found) != 1:
            return None  # a history is never given to a request that may be another
        self._pool.come_back(found[0])
        found[0].outputs, found[0].is_told = request.outputs, False
        return found[0]

    def layout(self) -> Layout | None:
        """Slots, last tokens and positions of the rows about to be sampled; None: nothing to do.

        Raises:
            RuntimeError: the last token of a row is known neither on the device nor on the host.
        """
        if self.is_empty:
            self._asked, self._sampled, self._changed = [], None, True
            return None
        self._steps += 1
        if (
            self._changed
            or self._sampled is None
            or self._steps == len(self._positions)
            or not self._all_advanced()
        ):
            layout = self._rebuild()
        else:
            layout = Layout(self._slots, self._sampled, self._positions[self._steps])
        self._sampled = None
        return layout

    def sampled(self, token: Tensor) -> None:
        """The tokens [R, 1] drawn for the rows of the last layout, on the device."""
        self._sampled = token.view(-1)

    def _all_advanced(self) -> bool:
        steps = self._steps
        return all(
            len(row.outputs) == position + steps for row, position in self._asked if row is not None
        )

    def _rebuild(self) -> Layout:
        """The general case; also prepares the positions of the next steps."""
        before = {
            id(row): (index, position + self._steps - 1)
            for index, (row, position) in enumerate(self._asked)
            if row is not None
        }
        sampled, self._asked = self._sampled, []
        sources, seeded, seeds = [], [], []
        for index, row in enumerate(self._rows):
            position = len(row.outputs) if row is not None else 0
            self._asked.append((row, position))
            source, old_position = before.get(id(row), (0, -1))
            if row is None or position == 0:
                sources.append(0)
            elif sampled is not None and old_position == position - 1:
                sources.append(source)
            elif row.outputs[-1] != _UNKNOWN:
                sources.append(0)
                seeded.append(index)
                seeds.append(row.outputs[-1])
            else:
                raise RuntimeError(
                    f"output token {position - 1} of a request is known neither on the device nor "
                    "on the host: the sampled tokens were not handed over. Another plugin may have "
                    "replaced vllm.v1.sample.sampler.Sampler.forward; start the engine with "
                    "--no-async-scheduling"
                )
        slots = [row.slot if row is not None else -1 for row in self._rows]
        positions = [position for _, position in self._asked]
        packed = upload([slots, positions, sources], self._device)  # [3, R]
        if sampled is None:
            token = torch.zeros_like(packed[0])
        else:
            token = sampled.index_select(0, packed[2]).to(torch.int64)
        if seeds:
            where, tokens = upload([seeded, seeds], self._device)
            token.index_copy_(0, where, tokens)
        self._slots = packed[0]
        self._positions = (self._ramp + packed[1]).unbind(0)
        self._steps = 0
        self._changed = False
        return Layout(self._slots, token, self._positions[0])


def _may_continue(before: Sequence[int], now: Sequence[int]) -> bool:
    """True if a request with outputs `before` may have come back with `now`.

    A token that was in flight when the request was preempted may be missing.
    """
    return 0 <= len(before) - len(now) <= 1 and all(
        old in (_UNKNOWN, new) for old, new in zip(before, now, strict=False)
    )
