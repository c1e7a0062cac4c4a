"""The temperature rule on rows: one history and one entropy give one temperature.

Pure functions of tensors with one row per token; docs/policy.md gives the equations. Knows the
columns of a history and of a parameter row, nothing of slots, tokens, logits or engines.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from reset.config import ESTIMATORS, POLICIES, ReSETConfig

# Columns of a history, float64. Sums of float32 entropies are exact or nearly so in float64; in
# float32 the rounding would decide "H_step <= H_bar" where the two means are equal, which is the
# whole first step of every request.
RUN_SUM, WINDOW_SUM, STEP_SUM, EMA, COUNT, STEP_COUNT = range(6)
HISTORY_COLUMNS = 6

# Columns of a parameter row, float64.
T_LOW, T_HIGH, TAU_0, BASE_TEMP, WINDOW, POLICY, ESTIMATOR = range(7)
PARAM_COLUMNS = 7


class Decision(NamedTuple):
    """What the policy decided for each row, and from what; all [B], entropies in nats."""

    temperature: Tensor  # float32; NaN if the row's entropy, now or earlier, was NaN
    threshold: Tensor  # float64 tau_t; +inf: T_low whatever H_t is; NaN: no threshold ("fixed")
    entropy: Tensor  # float64 H_t, as given
    step_entropy: Tensor  # float64 H_step
    mean_entropy: Tensor  # float64 H_bar


def parameter_row(config: ReSETConfig) -> list[float]:
    """The values of `config` in the order of the parameter columns; NaN where it has none."""
    row = [0.0] * PARAM_COLUMNS
    row[T_LOW] = config.t_low if config.t_low is not None else torch.nan
    row[T_HIGH] = config.t_high
    row[TAU_0] = config.tau_0 if config.tau_0 is not None else torch.nan
    row[BASE_TEMP] = config.base_temp
    row[WINDOW] = float(config.window)
    row[POLICY] = float(POLICIES.index(config.policy))
    row[ESTIMATOR] = float(ESTIMATORS.index(config.estimator))
    return row


def window_cells(params: Tensor, history: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where in a ring of `length` cells, at least the window, the entropies of the window lie.

    Returns:
        (entering [B] int64: the cell of H_t, leaving [B] int64: the cell of the entropy that H_t
        drives out, full [B] bool: False if nothing leaves yet). `leaving` may equal `entering`.
    """
    count, window = history[:, COUNT], params[:, WINDOW]
    entering = torch.remainder(count, length).to(torch.int64)
    leaving = torch.remainder(count - window, length).to(torch.int64)
    return entering, leaving, count >= window


def decide_rows(
    params: Tensor, history: Tensor, entropy: Tensor, new_step: Tensor, leaving: Tensor
) -> tuple[Decision, Tensor]:
    """Decide the temperature of each row's next token and let its entropy join the history.

    Args:
        params: [B, PARAM_COLUMNS] float64.
        history: [B, HISTORY_COLUMNS] float64, what came before; all zeros: nothing.
        entropy: [B] float64 H_t, a float32 value, in nats.
        new_step: [B] bool, True if the previous output token ended a step.
        leaving: [B] float64, the entropy that H_t drives out of the window; 0 if none.

    Returns:
        (the decision, the history [B, HISTORY_COLUMNS] with H_t in it).
    """
    run_sum, window_sum, step_sum, ema, count, step_count = history.unbind(1)
    step_sum = torch.where(new_step, 0.0, step_sum)
    step_count = torch.where(new_step, 0.0, step_count)
    window = params[:, WINDOW]

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
    alpha = 2.0 / (window + 1.0)
    columns = [
        new_run_sum,
        window_sum + entropy - leaving,
        step_sum + entropy,
        torch.where(seen, ema + alpha * (entropy - ema), entropy),
        count + 1,
        step_count + 1,
    ]
    decision = Decision(temperature, threshold, entropy, step_entropy, mean_entropy)
    return decision, torch.stack(columns, dim=1)


def _estimate(
    params: Tensor, window_mean: Tensor, step_mean: Tensor, ema_mean: Tensor, step_count: Tensor
) -> Tensor:
    """H_step [B] by each row's estimator."""
    kind = params[:, ESTIMATOR]
    estimate = torch.where(step_count >= params[:, WINDOW], step_mean, window_mean)  # hybrid
    estimate = torch.where(kind == ESTIMATORS.index("window"), window_mean, estimate)
    estimate = torch.where(kind == ESTIMATORS.index("causal"), step_mean, estimate)
    return torch.where(kind == ESTIMATORS.index("ema"), ema_mean, estimate)


def _threshold(
    params: Tensor, step_entropy: Tensor, mean_entropy: Tensor, window_mean: Tensor
) -> Tensor:
    """tau_t [B] by each row's policy; +inf and NaN as in `Decision.threshold`."""
    kind = params[:, POLICY]
    tau_0 = params[:, TAU_0]
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
    temperature = torch.where(entropy < threshold, params[:, T_LOW], params[:, T_HIGH])
    fixed = params[:, POLICY] == POLICIES.index("fixed")
    temperature = torch.where(fixed, params[:, BASE_TEMP], temperature)
    # Comparisons with NaN are False and would mean T_high: a silent repair.
    return torch.where(poisoned, torch.nan, temperature).to(torch.float32)
