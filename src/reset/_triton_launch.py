"""The host's side of the Triton kernels: scratch memory, and launches that cost little.

Importing this needs Triton; `reset.tracker` and `reset.sampler` do so when they first use it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from reset._triton import FACTS, FIELDS, PARTIALS, policy_kernel, scale_kernel, track_kernel
from reset.policy import TemperaturePolicy
from reset.rule import Decision
from reset.slot_layout import record_length, ring_length, ring_start

# Logits per program: 16 KiB of float32, so that one row of 152k logits occupies 38 multiprocessors
# and a program's 16 logits per thread are four 16-byte loads in flight.
TILE = 4096
WARPS = 8
# Of the first launch. Only the one program per slot that rolls the policy needs more (97 on sm_90);
# it may spill, so that five programs fit a multiprocessor instead of two, which reading needs.
REGISTERS = 48


class _Kernels:
    """Two launches over the tiles of a batch of logits, and the scratch between them."""

    def __init__(
        self, device: torch.device, rows: int, tile: int, warps: int, registers: int
    ) -> None:
        if device.type != "cuda" and isinstance(scale_kernel, triton.JITFunction):
            raise ValueError(
                f"the Triton backend needs a CUDA device, not {device}; use backend='torch' (tests "
                "run the kernels on a CPU with TRITON_INTERPRET=1 set before Triton is imported)"
            )
        self._device = device
        self._tile = tile
        self._warps = warps
        self._registers = registers
        self._compiled: dict[Any, tuple[Any, Any]] = {}
        self._rows, self._tiles_pad = rows, 0  # that scratch is there for, once it is there
        self._scratch: list[tuple[Tensor, Tensor, Tensor]] = []

    def _reserve(self, rows: int, tiles_pad: int) -> None:
        """Scratch for a batch: allocated by the first call, and again if a larger one comes.

        What was there stays, since a CUDA graph may have been captured with it.
        """
        if rows > self._rows or tiles_pad > self._tiles_pad:
            self._rows = max(rows, self._rows)
            self._tiles_pad = max(tiles_pad, self._tiles_pad)
            size = self._rows * PARTIALS * self._tiles_pad
            partials = torch.empty(size, dtype=torch.float32, device=self._device)
            tickets = torch.zeros(self._rows, dtype=torch.int32, device=self._device)
            facts = torch.empty(self._rows * FACTS, dtype=torch.float32, device=self._device)
            self._scratch.append((partials, tickets, facts))

    def _run(
        self,
        kernel: Any,
        logits: Tensor,
        inputs: tuple[Any, ...],
        input_types: tuple[Any, ...],
        constants: tuple[int, ...],
    ) -> Decision:
        rows, width = logits.shape
        stride = logits.stride(0)
        if width > 1 and logits.stride(1) != 1:
            raise ValueError(
                f"logits have strides {logits.stride()}; each row must be contiguous. "
                "Pass logits.contiguous() and copy the result back"
            )
        tiles = -(-width // self._tile)
        tiles_pad = 1 << (tiles - 1).bit_length()
        self._reserve(rows, tiles_pad)
        temperature = torch.empty(rows, dtype=torch.float32, device=self._device)
        fields = torch.empty((FIELDS, rows), dtype=torch.float64, device=self._device)
        decision = Decision(temperature, *fields.unbind(0))
        if rows == 0:
            return decision
        grid = (tiles, rows, 1)
        shape = (width, self._tile, tiles, tiles_pad)
        partials, tickets, facts = self._scratch[-1]
        outputs = (partials, tickets, facts, temperature, fields)
        first = (logits, stride, *inputs, *outputs, *shape, *constants)
        lowest = 0.0 if logits.dtype == torch.float32 else torch.finfo(logits.dtype).min
        second = (logits, stride, partials, facts, *shape, lowest)
        # What a compiled kernel depends on besides the constants; asking Triton's own cache takes
        # several times as long as the launch.
        key = (
            logits.dtype,
            width,
            logits.data_ptr() % 16,
            stride % 16 == 0,
            stride == 1,
            *input_types,
        )
        if self._device.type == "cuda" and torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):  # Triton launches on the current device
                self._launch(key, kernel, grid, first, second)
        else:
            self._launch(key, kernel, grid, first, second)
        return decision

    def _launch(
        self, key: Any, kernel: Any, grid: tuple[int, int, int], first: Any, second: Any
    ) -> None:
        if (compiled := self._compiled.get(key)) is not None:
            compiled[0][grid](*first)
            compiled[1][grid](*second)
            return
        options = {"num_warps": self._warps, "enable_fp_fusion": False}
        one = kernel[grid](*first, **options, maxnreg=self._registers)
        other = scale_kernel[grid](*second, **options)
        if one is not None:  # None: the interpreter ran it
            self._compiled[key] = one, other


class TrackerKernels(_Kernels):
    """`RequestTracker.scale` on its records."""

    def __init__(
        self,
        records: Tensor,
        table: Tensor,
        *,
        max_window: int,
        max_rows: int,
        tile: int = TILE,
        warps: int = WARPS,
        registers: int = REGISTERS,
    ) -> None:
        super().__init__(records.device, (records.shape[0] - 1) * max_rows, tile, warps, registers)
        self._records = records
        self._table = table.contiguous()
        self._constants = (
            records.shape[0] - 1,
            max_rows,
            triton.next_power_of_2(max_rows),
            record_length(max_window, max_rows),
            ring_start(max_rows),
            ring_length(max_window, max_rows),
            *table.shape,
        )

    def scale(self, logits: Tensor, slots: Tensor, token: Tensor, position: Tensor) -> Decision:
        """See `RequestTracker.scale`, which has checked the arguments."""
        return self._run(
            track_kernel,
            logits,
            (
                *(tensor.contiguous() for tensor in (slots, token, position)),
                self._records,
                self._table,
            ),
            (slots.dtype, token.dtype, position.dtype),
            self._constants,
        )


class PolicyKernels(_Kernels):
    """`scale_logits` on the state of a `TemperaturePolicy`."""

    def __init__(
        self,
        policy: TemperaturePolicy,
        *,
        tile: int = TILE,
        warps: int = WARPS,
        registers: int = REGISTERS,
    ) -> None:
        super().__init__(policy.device, policy.slots, tile, warps, registers)
        self._memory = (policy.params, policy.state, policy.ring)
        self._constants = (policy.slots, policy.max_window)

    def scale(self, logits: Tensor, slots: Tensor | None, new_step: Tensor) -> Decision:
        """See `scale_logits`, which has checked the arguments."""
        return self._run(
            policy_kernel,
            logits,
            (
                None if slots is None else slots.contiguous(),
                new_step.contiguous(),
                *self._memory,
            ),
            (slots is None,),
            self._constants,
        )
