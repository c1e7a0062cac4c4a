"""Histories of the requests of a serving engine, kept on the device, where positions are the truth.

An engine asks for more rows than it keeps tokens: chunks of a prefill, a preempted request that is
computed again, drafts that are rejected. So every row says which output position it decides, and
a slot keeps the results of its last call apart until the next call shows how many of them stood.
Knows nothing of any engine; the rule is in `reset.rule`, the kernels are in `reset._triton`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reset.config import ReSETConfig
from reset.entropy import entropy_nats
from reset.rule import HISTORY_COLUMNS, Decision, decide_rows, parameter_row, window_cells
from reset.sampler import Backend, apply_temperature, check_logits, choose_backend
from reset.slot_layout import (
    ADMITTED,
    AUTOMATON,
    ENTROPY,
    FIRST,
    HIGH,
    LOST,
    OWN_TEMPERATURE,
    PENDING,
    SNAPSHOT_COLUMNS,
    SNAPSHOTS,
    STEPS,
    TOKENS,
    record_length,
    ring_length,
    ring_start,
)
from reset.steps import StepDetector


class RequestTracker:
    """One slot per request: step automaton, entropies and policy, advanced by the rows of a batch.

    A slot holds the history of output positions 0 .. c-1 and, apart from it, what its last call
    found for positions c, c+1, ... When its next call begins at position p, the results before p
    join the history and the others are thrown away; the new rows are then rolled over the history
    in order, each later one as if the tokens of the earlier ones were kept. A call repeated with
    the same p changes nothing. If p fits neither (p < c, or beyond the last result), the history
    is lost: the slot begins afresh at p, as with a first token, and its count of losses goes up.

    Args:
        detector: ends of steps; its vocabulary must cover every token id that may come.
        slots: how many requests can be held at once, >= 1.
        device: where everything lives.
        max_window: largest `window` a request may have; memory is 8 bytes x `max_window` per slot.
        max_rows: most rows of one slot in one call, 1 + draft tokens.
        backend: "triton": kernels, two launches a call; "torch": plain torch, the reference;
            "auto": Triton on CUDA where it is installed.

    Example:
        >>> detector = StepDetector.from_pieces(["a", "\\n"])
        >>> tracker = RequestTracker(detector, slots=4, device="cpu")
        >>> tracker.admit([2], [ReSETConfig(t_low=0.5, tau_0=0.3)], temperatures=[1.0])
        >>> logits = torch.tensor([[3.0, 0.0], [3.0, 0.0]])
        >>> rows = {"slots": [2, -1], "token": [0, 0], "position": [0, 0]}
        >>> decision = tracker.scale(logits, **{k: torch.tensor(v) for k, v in rows.items()})
        >>> logits
        tensor([[6., 0.],
                [3., 0.]])
    """

    def __init__(
        self,
        detector: StepDetector,
        slots: int,
        *,
        device: torch.device | str,
        max_window: int = 32,
        max_rows: int = 1,
        backend: Backend = "auto",
    ) -> None:
        for name, value in (("slots", slots), ("max_window", max_window), ("max_rows", max_rows)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.slots = slots
        self.max_window = max_window
        self.max_rows = max_rows
        self.detector = detector.to(device)
        self._host_table = detector.table.cpu()
        # One record more than slots: rows that belong to no request read it; it stays zero.
        record = record_length(max_window, max_rows)
        self._records = torch.zeros((slots + 1, record), dtype=torch.float64, device=device)
        self._kernels: Any = None  # a reset._triton_launch.TrackerKernels
        if choose_backend(backend, self.device) == "triton":
            from reset._triton_launch import TrackerKernels

            self._kernels = TrackerKernels(
                self._records, self.detector.table, max_window=max_window, max_rows=max_rows
            )

    @property
    def device(self) -> torch.device:
        """Where the records live."""
        return self._records.device

    @property
    def backend(self) -> str:
        """What runs: "torch" or "triton"."""
        return "torch" if self._kernels is None else "triton"

    def admit(
        self,
        slots: Sequence[int],
        configs: Sequence[ReSETConfig],
        temperatures: Sequence[float],
        outputs: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Put requests into slots: whatever these held is forgotten.

        Args:
            slots: distinct slots, 0 .. slots-1.
            configs: parameters of each.
            temperatures: the sampling temperature of each, > 0, by which the engine will divide the
                logits afterwards; scaled rows are multiplied by it, so that the division cancels.
            outputs: all output tokens that each request has already, oldest first, where its
                history is gone. Such a request counts as lost once; it is expected to go on at
                position len(outputs), and steps go on across the gap.

        Raises:
            ValueError: lengths differ; a slot does not exist or is named twice; a window exceeds
                `max_window`; a temperature is not finite and > 0; a token id is unknown.
        """
        outputs = [()] * len(slots) if outputs is None else outputs
        if not len(slots) == len(configs) == len(temperatures) == len(outputs):
            raise ValueError(
                f"{len(slots)} slots, {len(configs)} configs, {len(temperatures)} temperatures and "
                f"{len(outputs)} outputs; one of each is needed per request"
            )
        self._check_slots("slots", slots)
        records = [
            self._first_record(*request)
            for request in zip(slots, configs, temperatures, outputs, strict=True)
        ]
        if records:
            staged = self._staged(records)  # one transfer: slot, then the front of its record
            index = staged[:, 0].to(torch.int64)
            self._records[:, : staged.shape[1] - 1].index_copy_(0, index, staged[:, 1:])

    def release(self, slots: Sequence[int]) -> None:
        """Empty slots: their rows are left alone until another `admit`."""
        self._check_slots("slots", slots)
        if slots:
            self._records.index_fill_(0, self._staged(list(slots)).to(torch.int64), 0.0)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole slots, all at once (so two may be swapped), on the device.

        Raises:
            ValueError: lengths differ, a slot does not exist, or a target is named twice.
        """
        if len(source) != len(target):
            raise ValueError(f"{len(source)} source slots and {len(target)} targets; pair them")
        self._check_slots("source", source, distinct=False)
        self._check_slots("target", target)
        if source:
            index = self._staged([list(source), list(target)]).to(torch.int64)
            self._records.index_copy_(0, index[1], self._records.index_select(0, index[0]))

    def scale(self, logits: Tensor, slots: Tensor, token: Tensor, position: Tensor) -> Decision:
        """Divide each row by its request's step-aware temperature, in place, and advance.

        Rows of one slot are adjacent, at consecutive positions. A row whose slot is -1 or holds no
        request, or whose position is negative, is left alone bit for bit. Mistakes that only the
        device can see become NaN, never a sample: a slot that does not exist, the rows of a slot
        beyond `max_rows`, and, from then on, a request that is fed a token id outside the
        detector's vocabulary. Nothing waits for the device.

        Args:
            logits: [R, V] float32, bfloat16 or float16, raw; each row contiguous. Overwritten.
            slots: [R] int32 or int64, below the number of slots.
            token: [R] int32 or int64, the token fed at that row, i.e. output token position - 1;
                ignored at position 0 and where the row is left alone.
            position: [R] int32 or int64, how many output tokens precede the one to be drawn.

        Returns:
            The `Decision`, [R] each; `temperature` is the policy's, before the request's own is
            cancelled. NaN throughout for a row left alone.

        Raises:
            ValueError, TypeError: shape, dtype or device do not fit (before anything is written).
        """
        check_logits(logits)
        self._check_rows("logits", logits, slots, token, position)
        if self._kernels is not None:
            decision: Decision = self._kernels.scale(logits, slots, token, position)
            return decision
        entropy = entropy_nats(logits)
        decision, own_temperature, scaled = self._roll(entropy, slots, token, position)
        apply_temperature(
            logits, decision.temperature, own_temperature=own_temperature, rows=scaled
        )
        return decision

    def decide(self, entropy: Tensor, slots: Tensor, token: Tensor, position: Tensor) -> Decision:
        """As `scale`, from entropies [R] float32 instead of logits; always plain torch."""
        self._check_rows("entropy", entropy, slots, token, position)
        return self._roll(entropy, slots, token, position)[0]

    def summary(self) -> Tensor:
        """[slots, 5] float64 on the device: tokens, steps ended, tokens at T_high, sum of
        entropies (nats), losses, each since `admit`.

        Of the history only: the rows of a slot's last call are not in it, since nobody has said yet
        which of them stand. A view: it changes with the next call.
        """
        return self._records[: self.slots, SNAPSHOTS + TOKENS : SNAPSHOTS + LOST + 1]

    def _roll(
        self, entropy: Tensor, slots: Tensor, token: Tensor, position: Tensor
    ) -> tuple[Decision, Tensor, Tensor]:
        """Advance; (decision, own temperature [R] float32, rows to scale [R] bool)."""
        slots, token, position = (t.to(torch.int64) for t in (slots, token, position))
        entropy = entropy.to(torch.float32).to(torch.float64)
        asked = (slots >= 0) & (position >= 0)
        exists = asked & (slots < self.slots)
        home = torch.where(exists, slots, self.slots)
        admitted = self._records[:, ADMITTED].index_select(0, home) > 0
        home = torch.where(admitted, home, self.slots)
        first, order = _segments(home)  # index of the slot's first row, place among its rows
        advanced = admitted & (order < self.max_rows)
        home = torch.where(advanced, home, self.slots)
        params = self._records.index_select(0, home)[:, :SNAPSHOTS]  # [R, parameters and two more]

        start = position.index_select(0, first)
        current = self._kept(home, params, start)  # [R, columns]: the history before each row
        fields = [torch.full_like(entropy, torch.nan) for _ in Decision._fields]
        self._write_snapshot(home, advanced & (order == 0), 0, current)
        for step in range(self.max_rows):
            rows = advanced & (order == step)
            if step > 0:  # a row goes on from its predecessor
                current = torch.where(rows.unsqueeze(1), current.roll(1, 0), current)
            decision, after = self._next(params, home, current, entropy, token, position, rows)
            current = torch.where(rows.unsqueeze(1), after, current)
            self._write_snapshot(home, rows, step + 1, current)
            fields = [
                torch.where(rows, new, old) for new, old in zip(decision, fields, strict=True)
            ]
        self._write_rows_seen(home, advanced, start)
        temperature, *others = fields
        own_temperature = params[:, OWN_TEMPERATURE].float()
        return Decision(temperature.float(), *others), own_temperature, admitted | (asked & ~exists)

    def _kept(self, home: Tensor, params: Tensor, start: Tensor) -> Tensor:
        """[R, columns]: the history of each row's slot up to position `start`."""
        kept = start - params[:, FIRST].to(torch.int64)
        fits = (kept >= 0) & (kept <= params[:, PENDING].to(torch.int64))
        history = self._snapshots[home, torch.where(fits, kept, 0)]
        fresh = history.clone()
        fresh[:, : AUTOMATON + 1] = 0.0
        fresh[:, LOST] += 1.0
        return torch.where(fits.unsqueeze(1), history, fresh)

    def _next(
        self,
        params: Tensor,
        home: Tensor,
        current: Tensor,
        entropy: Tensor,
        token: Tensor,
        position: Tensor,
        rows: Tensor,
    ) -> tuple[Decision, Tensor]:
        """One token for each row: (decision, [R, columns]); the rings of `rows` take it in."""
        fed = rows & (position > 0)
        known = (token >= 0) & (token < self.detector.vocab_size)
        walked = fed & known
        before = current[:, AUTOMATON].to(torch.int64)
        state, ended = self.detector.advance(before, torch.where(walked, token, 0))
        ended = ended & walked
        entropy = torch.where(fed & ~known, torch.nan, entropy)

        entering, leaving, full = window_cells(params, current, self._ring.shape[1])
        oldest = torch.where(full, self._ring[home, leaving], 0.0)
        decision, history = decide_rows(
            params, current[:, :HISTORY_COLUMNS], entropy, ended, oldest
        )
        target = torch.where(rows, home, self.slots)
        self._ring[target, entering] = torch.where(rows, entropy, 0.0)

        after = current.clone()
        after[:, :HISTORY_COLUMNS] = history
        after[:, AUTOMATON] = torch.where(walked, state, before).double()
        after[:, TOKENS] += 1.0
        after[:, STEPS] += ended.double()
        after[:, HIGH] += ((entropy >= decision.threshold) & ~decision.temperature.isnan()).double()
        after[:, ENTROPY] += entropy
        return decision, after

    def _write_snapshot(self, home: Tensor, rows: Tensor, index: int, values: Tensor) -> None:
        target = torch.where(rows, home, self.slots)
        self._snapshots[target, index] = torch.where(rows.unsqueeze(1), values, 0.0)

    def _write_rows_seen(self, home: Tensor, rows: Tensor, start: Tensor) -> None:
        count = torch.zeros(self.slots + 1, dtype=torch.float64, device=self.device)
        count.index_add_(0, home, rows.double())
        seen = torch.stack([start.double(), count.index_select(0, home)], dim=1)
        seen = torch.where(rows.unsqueeze(1), seen, 0.0)
        self._records[:, FIRST : PENDING + 1].index_copy_(0, home, seen)

    @property
    def _snapshots(self) -> Tensor:
        """[slots + 1, max_rows + 1, columns], a view."""
        part = self._records[:, SNAPSHOTS : ring_start(self.max_rows)]
        return part.unflatten(1, (self.max_rows + 1, SNAPSHOT_COLUMNS))

    @property
    def _ring(self) -> Tensor:
        """[slots + 1, cells], a view."""
        start = ring_start(self.max_rows)
        return self._records[:, start : start + ring_length(self.max_window, self.max_rows)]

    def _first_record(
        self, slot: int, config: ReSETConfig, temperature: float, outputs: Sequence[int]
    ) -> list[float]:
        """The slot, then its record up to the end of snapshot 0."""
        if config.window > self.max_window:
            raise ValueError(
                f"slot {slot}: window is {config.window}, but this tracker was built for windows "
                f"up to {self.max_window}; build it with max_window={config.window}"
            )
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(
                f"slot {slot}: the request's own temperature is {temperature}; it must be finite "
                "and > 0. A greedy request needs no policy: do not admit it"
            )
        record = [0.0] * (SNAPSHOTS + SNAPSHOT_COLUMNS)
        parameters = parameter_row(config)
        record[: len(parameters)] = parameters
        record[OWN_TEMPERATURE] = temperature
        record[ADMITTED] = 1.0
        if outputs:
            record[FIRST] = float(len(outputs))
            record[SNAPSHOTS + AUTOMATON] = float(self._state_before_last(slot, outputs))
            record[SNAPSHOTS + LOST] = 1.0
        return [float(slot), *record]

    def _state_before_last(self, slot: int, outputs: Sequence[int]) -> int:
        """State of the detector before the last token, which the next row will feed."""
        table = self._host_table
        if bad := [token for token in outputs if not 0 <= token < table.shape[0]]:
            raise ValueError(
                f"slot {slot}: output token {bad[0]} is not one of the detector's "
                f"{table.shape[0]} ids; pass the tokens that were drawn"
            )
        state = 0
        for token in outputs[:-1]:
            state = int(table[token, state]) & 127
        return state

    def _staged(self, values: list[Any]) -> Tensor:
        """float64 `values` on the device. The copy does not wait: its pinned source is new each
        time, and torch's host allocator reuses it only after the copy is done."""
        host = torch.tensor(values, dtype=torch.float64)
        if self.device.type != "cuda":
            return host.to(self.device)
        return host.pin_memory().to(self.device, non_blocking=True)

    def _check_slots(self, name: str, slots: Sequence[int], *, distinct: bool = True) -> None:
        if bad := [slot for slot in slots if not 0 <= slot < self.slots]:
            raise ValueError(
                f"{name}: slot {bad[0]} does not exist; they are 0 .. {self.slots - 1}"
            )
        if distinct and len(set(slots)) != len(slots):
            raise ValueError(f"{name} is {list(slots)}; each slot may be named once")

    def _check_rows(
        self, name: str, values: Tensor, slots: Tensor, token: Tensor, position: Tensor
    ) -> None:
        rows = values.shape[0]
        given = ((name, values), ("slots", slots), ("token", token), ("position", position))
        for what, tensor in given:
            if tensor.device != self.device:
                raise ValueError(f"{what} is on {tensor.device}, the tracker on {self.device}")
        for what, tensor in given[1:]:
            if tensor.shape != (rows,) or tensor.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"{what} is {tuple(tensor.shape)} {tensor.dtype}; int32 or int64 [{rows}] is "
                    f"needed, one per row of {name}"
                )


def _segments(home: Tensor) -> tuple[Tensor, Tensor]:
    """For runs of equal values in `home` [R]: (index of the run's first row, index in the run)."""
    index = torch.arange(home.shape[0], device=home.device)
    begins = torch.ones_like(home, dtype=torch.bool)
    begins[1:] = home[1:] != home[:-1]
    first = torch.where(begins, index, 0).cummax(0).values
    return first, index - first
