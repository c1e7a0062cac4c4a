"""The batched temperature policy: from one entropy per request to one temperature per request.

State and parameters live on the device, one row ("slot") per request; a step reads and writes them
with a fixed number of tensor operations and never waits for the device. docs/policy.md gives the
equations. Knows nothing of logits, tokens or engines.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from reset.config import ESTIMATORS, POLICIES, ReSETConfig

# Columns of `state`, float64. Sums of float32 entropies are exact or nearly so in float64; in
# float32 the rounding would decide "H_step <= H_bar" where the two means are equal, which is the
# whole first step of every request.
_RUN_SUM, _WINDOW_SUM, _STEP_SUM, _EMA, _COUNT, _STEP_COUNT = range(6)
_STATE_COLUMNS = 6

# Columns of `params`, float64.
_T_LOW, _T_HIGH, _TAU_0, _BASE_TEMP, _WINDOW, _POLICY, _ESTIMATOR = range(7)
_PARAM_COLUMNS = 7


class Decision(NamedTuple):
    """What the policy decided for each row, and from what; all [B], entropies in nats."""

    temperature: Tensor  # float32; NaN if the row's entropy, now or earlier, was NaN
    threshold: Tensor  # float64 tau_t; +inf: T_low whatever H_t is; NaN: no threshold ("fixed")
    entropy: Tensor  # float64 H_t, as given
    step_entropy: Tensor  # float64 H_step
    mean_entropy: Tensor  # float64 H_bar


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
        self.state = torch.zeros((slots, _STATE_COLUMNS), dtype=torch.float64, device=device)
        self.params = torch.empty((slots, _PARAM_COLUMNS), dtype=torch.float64, device=device)
        self._ring = torch.zeros(slots * self.max_window, dtype=torch.float32, device=device)
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
        row = [0.0] * _PARAM_COLUMNS
        row[_T_LOW] = config.t_low if config.t_low is not None else torch.nan
        row[_T_HIGH] = config.t_high
        row[_TAU_0] = config.tau_0 if config.tau_0 is not None else torch.nan
        row[_BASE_TEMP] = config.base_temp
        row[_WINDOW] = float(config.window)
        row[_POLICY] = float(POLICIES.index(config.policy))
        row[_ESTIMATOR] = float(ESTIMATORS.index(config.estimator))
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
        slots = self._check(entropy_nats, new_step, slots)
        entropy = entropy_nats.to(torch.float32).to(torch.float64)  # float32 is what is kept
        params = self.params.index_select(0, slots)  # [B, params]
        state = self.state.index_select(0, slots)  # [B, columns]
        run_sum, window_sum, step_sum, ema, count, step_count = state.unbind(1)
        step_sum = torch.where(new_step, 0.0, step_sum)
        step_count = torch.where(new_step, 0.0, step_count)
        window = params[:, _WINDOW]

        # The means over what came before t. Each falls back to H_t when it has seen nothing.
        seen = count > 0
        window_mean = torch.where(seen, window_sum / count.clamp(min=1).minimum(window), entropy)
        step_mean = torch.where(step_count > 0, step_sum / step_count.clamp(min=1), entropy)
        ema_mean = torch.where(seen, ema, entropy)
        step_entropy = _estimate(params, window_mean, step_mean, ema_mean, step_count)
        mean_entropy = torch.where(seen, run_sum / count.clamp(min=1), step_entropy)

        threshold = _threshold(params, step_entropy, mean_entropy, window_mean)
        new_run_sum = run_sum + entropy
        temperature = _temperature(params, entropy, threshold, poisoned=new_run_sum.isnan())

        # H_t joins the window, the step and the running mean.
        cell = slots * self.max_window + torch.remainder(count, window).to(torch.int64)
        oldest = torch.where(count >= window, self._ring.index_select(0, cell).double(), 0.0)
        alpha = 2.0 / (window + 1.0)
        new_ema = torch.where(seen, ema + alpha * (entropy - ema), entropy)
        self._ring.index_copy_(0, cell, entropy.float())
        columns = [
            new_run_sum,
            window_sum + entropy - oldest,
            step_sum + entropy,
            new_ema,
            count + 1,
            step_count + 1,
        ]
        self.state.index_copy_(0, slots, torch.stack(columns, dim=1))
        return Decision(temperature, threshold, entropy, step_entropy, mean_entropy)

    def _check(self, entropy: Tensor, new_step: Tensor, slots: Tensor | None) -> Tensor:
        batch = entropy.shape
        if entropy.ndim != 1 or not entropy.is_floating_point():
            raise ValueError(
                f"entropy_nats is {tuple(batch)} {entropy.dtype}; a floating-point [B] is needed"
            )
        if new_step.shape != batch or new_step.dtype != torch.bool:
            raise ValueError(
                f"new_step is {tuple(new_step.shape)} {new_step.dtype}; "
                f"bool {list(batch)} is needed, one per entropy"
            )
        if slots is None:
            if batch[0] > self.slots:
                raise ValueError(f"{batch[0]} rows, but this policy has {self.slots} slots")
            slots = self._every_slot[: batch[0]]
        elif slots.shape != batch or slots.dtype != torch.int64:
            raise ValueError(
                f"slots is {tuple(slots.shape)} {slots.dtype}; int64 {list(batch)} is needed"
            )
        for name, tensor in (("entropy_nats", entropy), ("new_step", new_step), ("slots", slots)):
            if tensor.device != self.device:
                raise ValueError(
                    f"{name} is on {tensor.device}, the policy's state on {self.device}; "
                    "move one of them"
                )
        return slots


def _estimate(
    params: Tensor, window_mean: Tensor, step_mean: Tensor, ema_mean: Tensor, step_count: Tensor
) -> Tensor:
    """H_step [B] by each row's estimator."""
    kind = params[:, _ESTIMATOR]
    estimate = torch.where(step_count >= params[:, _WINDOW], step_mean, window_mean)  # hybrid
    estimate = torch.where(kind == ESTIMATORS.index("window"), window_mean, estimate)
    estimate = torch.where(kind == ESTIMATORS.index("causal"), step_mean, estimate)
    return torch.where(kind == ESTIMATORS.index("ema"), ema_mean, estimate)


def _threshold(
    params: Tensor, step_entropy: Tensor, mean_entropy: Tensor, window_mean: Tensor
) -> Tensor:
    """tau_t [B] by each row's policy; +inf and NaN as in `Decision.threshold`."""
    kind = params[:, _POLICY]
    tau_0 = params[:, _TAU_0]
    confident = step_entropy <= mean_entropy
    threshold = torch.where(confident, tau_0, step_entropy)  # reset
    threshold = torch.where(kind == POLICIES.index("threshold"), tau_0, threshold)
    threshold = torch.where(kind == POLICIES.index("sliding"), window_mean, threshold)
    threshold = torch.where(kind == POLICIES.index("relative"), step_entropy, threshold)
    uniform = torch.where(confident, torch.inf, step_entropy)
    threshold = torch.where(kind == POLICIES.index("uniform"), uniform, threshold)
    return torch.where(kind == POLICIES.index("fixed"), torch.nan, threshold)


def _temperature(params: Tensor, entropy: Tensor, threshold: Tensor, poisoned: Tensor) -> Tensor:
    """T_t [B] float32: T_low below the threshold, T_high at it and above."""
    temperature = torch.where(entropy < threshold, params[:, _T_LOW], params[:, _T_HIGH])
    fixed = params[:, _POLICY] == POLICIES.index("fixed")
    temperature = torch.where(fixed, params[:, _BASE_TEMP], temperature)
    # Comparisons with NaN are False and would mean T_high: a silent repair.
    return torch.where(poisoned, torch.nan, temperature).to(torch.float32)
