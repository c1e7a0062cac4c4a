"""The batched temperature policy: from one entropy per request to one temperature per request.

State and parameters live on the device, one row ("slot") per request; a step reads and writes them
with a fixed number of tensor operations and never waits for the device. The rule itself is in
`reset.rule`. Knows nothing of logits, tokens or engines.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reset.config import ReSETConfig
from reset.rule import (
    HISTORY_COLUMNS,
    PARAM_COLUMNS,
    Decision,
    decide_rows,
    parameter_row,
    window_cells,
)

__all__ = ["Decision", "TemperaturePolicy"]


class TemperaturePolicy:
    """Temperature of the next token for a batch of requests.

    Args:
        config: parameters of every slot until `configure` gives some of them others.
        slots: how many requests can be held at once, >= 1.
        device: where state and parameters live.
        max_window: largest `window` a later `configure` may ask for; memory is 4 bytes x
            `max_window` per slot. Default: the window of `config`.

    Example:
        >>> policy = TemperaturePolicy(ReSETConfig(t_low=0.1, tau_0=0.5), slots=2)
        >>> policy.step(torch.tensor([0.2, 0.9]), torch.tensor([False, False]))
        tensor([0.1000, 1.0000])
    """

    def __init__(
        self,
        config: ReSETConfig,
        slots: int,
        device: torch.device | str = "cpu",
        max_window: int | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots is {slots}; at least 1 request must fit")
        self.slots = slots
        self.max_window = max_window if max_window is not None else config.window
        self.state = torch.zeros((slots, HISTORY_COLUMNS), dtype=torch.float64, device=device)
        self.params = torch.empty((slots, PARAM_COLUMNS), dtype=torch.float64, device=device)
        self.ring = torch.zeros(slots * self.max_window, dtype=torch.float32, device=device)
        self.kernels: Any = None  # what `scale_logits` keeps between calls on a GPU
        self._every_slot = torch.arange(slots, device=device)
        self._greedy_slots: set[int] = set()
        self.configure(config)

    @property
    def device(self) -> torch.device:
        """Where the state lives."""
        return self.state.device

    @property
    def may_be_greedy(self) -> bool:
        """True if some slot may yield a temperature that means exact argmax (known on the host)."""
        return bool(self._greedy_slots)

    def configure(self, config: ReSETConfig, slots: list[int] | None = None) -> None:
        """Give slots (all by default) the parameters of `config` and forget their history.

        Raises:
            ValueError: the window exceeds `max_window`, or a slot does not exist.
        """
        if config.window > self.max_window:
            raise ValueError(
                f"window is {config.window}, but this policy was built for windows up to "
                f"{self.max_window}; build it with max_window={config.window}"
            )
        chosen = list(range(self.slots)) if slots is None else slots
        if bad := [slot for slot in chosen if not 0 <= slot < self.slots]:
            raise ValueError(f"slot {bad[0]} does not exist; slots are 0 .. {self.slots - 1}")
        row = parameter_row(config)
        index = torch.tensor(chosen, dtype=torch.int64, device=self.device)
        self.params[index] = torch.tensor(row, dtype=torch.float64, device=self.device)
        self.state[index] = 0.0
        self._greedy_slots.difference_update(chosen)
        if config.may_be_greedy:
            self._greedy_slots.update(chosen)

    def reset(self, slots: Tensor | None = None) -> None:
        """Forget the history of `slots` ([n] int64, all by default); parameters stay."""
        if slots is None:
            self.state.zero_()
        else:
            self.state.index_fill_(0, slots, 0.0)

    def step(self, entropy_nats: Tensor, new_step: Tensor, slots: Tensor | None = None) -> Tensor:
        """Temperature for the token about to be drawn; its entropy joins the history.

        Args:
            entropy_nats: [B] float32, H_t of the raw logits, in nats.
            new_step: [B] bool, True if the request's previous output token ended a step.
            slots: [B] int64, distinct slot of each row; None means row i is slot i.

        Returns:
            [B] float32, each one of the request's temperatures. NaN for a row whose entropy is
            NaN, and for that request from then on: bad logits are never turned into a sample.

        Raises:
            ValueError: shapes disagree, or a tensor is on another device.
        """
        return self.decide(entropy_nats, new_step, slots).temperature

    def decide(
        self, entropy_nats: Tensor, new_step: Tensor, slots: Tensor | None = None
    ) -> Decision:
        """As `step`, but returns the threshold and the means behind the temperature as well."""
        if entropy_nats.ndim != 1 or not entropy_nats.is_floating_point():
            raise ValueError(
                f"entropy_nats is {tuple(entropy_nats.shape)} {entropy_nats.dtype}; "
                "a floating-point [B] is needed"
            )
        self.check_rows("entropy_nats", entropy_nats, new_step, slots)
        if slots is None:
            slots = self._every_slot[: entropy_nats.shape[0]]
        entropy = entropy_nats.to(torch.float32).to(torch.float64)  # float32 is what is kept
        params = self.params.index_select(0, slots)  # [B, params]
        history = self.state.index_select(0, slots)  # [B, columns]
        entering, leaving, full = window_cells(params, history, self.max_window)
        first_cell = slots * self.max_window
        oldest = self.ring.index_select(0, first_cell + leaving).double()
        decision, history = decide_rows(
            params, history, entropy, new_step, torch.where(full, oldest, 0.0)
        )
        self.ring.index_copy_(0, first_cell + entering, entropy.float())
        self.state.index_copy_(0, slots, history)
        return decision

    def check_rows(self, name: str, values: Tensor, new_step: Tensor, slots: Tensor | None) -> None:
        """Raise a ValueError unless all fit `values` [B, ...], which the message calls `name`."""
        batch = values.shape[0]
        if new_step.shape != (batch,) or new_step.dtype != torch.bool:
            raise ValueError(
                f"new_step is {tuple(new_step.shape)} {new_step.dtype}; "
                f"bool [{batch}] is needed, one per row of {name}"
            )
        if slots is None:
            if batch > self.slots:
                raise ValueError(f"{batch} rows, but this policy has {self.slots} slots")
        elif slots.shape != (batch,) or slots.dtype != torch.int64:
            raise ValueError(
                f"slots is {tuple(slots.shape)} {slots.dtype}; int64 [{batch}] is needed"
            )
        for what, tensor in ((name, values), ("new_step", new_step), ("slots", slots)):
            if tensor is not None and tensor.device != self.device:
                raise ValueError(
                    f"{what} is on {tensor.device}, the policy's state on {self.device}; "
                    "move one of them"
                )
