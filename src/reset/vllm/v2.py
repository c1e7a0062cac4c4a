"""Request slots of vLLM's V2 runner: which of them ReSET works on, and at which output position.

The runner names rows by a request slot that stays the same while a request runs, and hands over the
token fed at every row, draft tokens included. It frees the slot of a preempted request and later
adds the request anew, possibly elsewhere, with its outputs as part of what is filled in. It says
nothing when a request ends. Needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reset.vllm.slots import SlotPool, Tracked
from reset.vllm.staging import upload
from reset.vllm.v1 import Layout

_RAMP = 128  # steps whose positions are prepared at once


class SlotTable:
    """From the runner's request slots to slots of the tracker.

    Args:
        pool: slots of the tracker.
        max_requests: request slots of the runner.
        device: of the logits.
        admit: called with a list of requests that start without a history.
        on_leave: called with a request whose place another one took.
        drafts: most draft tokens of a request in one step. With drafts, a request has several rows,
            and the host does not know how many of them were kept.
    """

    def __init__(
        self,
        pool: SlotPool,
        max_requests: int,
        device: torch.device,
        admit: Callable[[list[Tracked]], None],
        on_leave: Callable[[Tracked], None],
        drafts: int = 0,
    ) -> None:
        self._pool = pool
        self._device = device
        self._admit = admit
        self._on_leave = on_leave
        self._drafts = drafts
        self._occupants: list[Tracked | None] = [None] * max_requests
        self._is_tracked = np.zeros(max_requests, dtype=bool)
        self._prompt_length = np.zeros(max_requests, dtype=np.int64)
        self._fill_length = np.zeros(max_requests, dtype=np.int64)
        self._length = np.zeros(max_requests, dtype=np.int64)  # visible to the last row, at most
        # tracker slot or -1, prompt length, fill length
        self._table = torch.tensor([[-1, 0, 0]] * max_requests, device=device)
        self._staged: dict[int, tuple[int, int, int]] = {}
        self._was_scheduled = np.zeros(max_requests, dtype=bool)  # in the last step
        self._is_new_step = True
        self._batch = np.empty(0, dtype=np.int32)  # of the last call, and its lengths
        self._lengths = np.empty(0, dtype=np.int32)
        self._slots = torch.empty(0)
        self._positions: tuple[Tensor, ...] = ()
        self._steps = 0
        self._ramp = torch.arange(_RAMP, device=device).unsqueeze(1)  # [ramp, 1]

    def add(
        self, index: int, request: Tracked | None, prompt_length: int, fill_length: int
    ) -> None:
        """A request enters request slot `index`; `request` is None if ReSET leaves it alone.

        Args:
            prompt_length: tokens of the user's prompt.
            fill_length: tokens to be filled in before the next output: the prompt, and after a
                preemption the outputs so far.
        """
        self._settle()
        known = None
        outputs = fill_length - prompt_length
        if request is not None and request.key is not None:
            known = self._known(request, index, outputs)
        self._vacate(index)
        if known is not None:
            known.is_told = False
        if request is not None and known is None:
            self._pool.admit(request)
            self._admit([request])
        occupant = known or request
        self._occupants[index] = occupant
        self._is_tracked[index] = occupant is not None
        self._prompt_length[index] = prompt_length
        self._fill_length[index] = fill_length
        self._length[index] = fill_length - 1 if outputs > 0 else 0
        slot = occupant.slot if occupant is not None else -1
        self._staged[index] = (slot, prompt_length, fill_length)

    def _vacate(self, index: int) -> None:
        left = self._occupants[index]
        if left is not None:
            left.next_position = self._outputs_at_most(index)
            self._occupants[index] = None
            self._on_leave(left)
            self._pool.leave(left)

    def _outputs_at_most(self, index: int) -> int:
        """Output tokens of the request at `index`, the one drawn last included."""
        return max(0, int(self._length[index] - self._prompt_length[index]) + 1)

    def _known(self, request: Tracked, target: int, outputs: int) -> Tracked | None:
        """The same request from before its preemption, wherever its history is.

        Requests of one prompt (n > 1) without a seed share a key. If several of them could be it,
        none is taken: the tracker then starts afresh and counts the loss.
        """
        resting = []
        for index, occupant in enumerate(self._occupants):
            if occupant is None or occupant.key != request.key:
                continue
            is_resting = not self._ran_last(index) and index not in self._staged
            if index == target or is_resting:
                occupant.next_position = self._outputs_at_most(index)
                resting.append((index, occupant))
        resting = [entry for entry in resting if self._fits(entry[1], outputs)]
        away = [one for one in self._pool.away(request.key) if self._fits(one, outputs)]
        if len(resting) + len(away) != 1:
            return None
        if away:
            self._pool.come_back(away[0])
            return away[0]
        index, found = resting[0]
        self._occupants[index] = None
        self._is_tracked[index] = False
        self._staged[index] = (-1, 0, 0)
        return found

    def _take_lengths(self) -> None:
        """Of the last call, which steps of an unchanged batch leave to later."""
        batch = self._batch
        self._length[batch] = np.maximum(self._length[batch], self._lengths)

    def _settle(self) -> None:
        """The batch is about to change: nothing prepared for it holds any longer."""
        self._take_lengths()
        self._batch = np.empty(0, dtype=np.int32)
        self._lengths = np.empty(0, dtype=np.int32)
        self._positions = ()

    def _ran_last(self, index: int) -> bool:
        """True if the last step had a row of this request slot; a step may run nothing."""
        return bool(self._was_scheduled[index]) and not self._is_new_step

    def _fits(self, before: Tracked, outputs: int) -> bool:
        # A token that was in flight at the preemption may be missing; with drafts, the host's count
        # runs ahead by what was rejected in the steps that are under way.
        slack = 1 + 3 * self._drafts
        return 0 <= before.next_position - outputs <= slack

    def flush(self) -> None:
        """Send what `add` changed to the device; called once a step, before its layouts."""
        self._is_new_step = True
        if not self._staged:
            return
        entries = [[index, *entry] for index, entry in self._staged.items()]
        packed = upload(entries, self._device)  # [n, 4]
        self._table.index_copy_(0, packed[:, 0], packed[:, 1:])
        self._staged.clear()

    def tell_absent(self) -> None:
        """Call `on_leave` for requests that the last step did not have; for the log.

        One that merely was not scheduled may be told again when it leaves later.
        """
        self._take_lengths()
        for index, occupant in enumerate(self._occupants):
            if occupant is None:
                continue
            if self._ran_last(index):
                occupant.is_told = False
            elif index not in self._staged:
                occupant.next_position = self._outputs_at_most(index)
                self._on_leave(occupant)

    def layout(self, context: Any) -> Layout | None:
        """Slots, tokens and positions of the rows of a call; None: nothing to do.

        Args:
            context: vLLM's LogitsContext. A step may have several calls, of different requests.
        """
        batch = context.idx_mapping_np
        lengths = context.seq_lens_upper_bound_np[: len(batch)]
        if (
            self._steps + 1 < len(self._positions)
            and self._batch.tobytes() == batch.tobytes()
            and (self._lengths + 1).tobytes() == lengths.tobytes()
        ):
            # The same requests, one token further; the arrays are the runner's own and may change.
            self._is_new_step = False
            self._lengths = lengths.copy()
            self._steps += 1
            return Layout(self._slots, context.input_ids, self._positions[self._steps])
        self._settle()
        if self._is_new_step:
            self._was_scheduled[:] = False
            self._is_new_step = False
        self._was_scheduled[batch] = True
        self._batch, self._lengths = batch.copy(), lengths.copy()
        if not self._is_tracked[batch].any():
            return None
        entry = self._table.index_select(0, context.expanded_idx_mapping)  # [R, 3]
        seen = context.pos + 1
        position = seen - entry[:, 1]
        slots = torch.where(seen >= entry[:, 2], entry[:, 0], -1)  # -1: the sample is discarded
        self._slots, self._steps = slots, 0
        # With drafts the host knows neither the rows nor the lengths of the next step.
        if self._drafts == 0 and (lengths >= self._fill_length[batch]).all():
            self._positions = (self._ramp + position).unbind(0)
        return Layout(slots, context.input_ids, position)
