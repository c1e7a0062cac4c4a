"""The temperature rule for one row, in Triton: what `reset.rule` does, operation by operation.

Compiled without fused multiply-adds its float64 results are those of torch, bit for bit.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl

from reset import rule
from reset.config import ESTIMATORS, POLICIES

# What a kernel reads from outside must be a constexpr.
_T_LOW, _T_HIGH, _TAU_0 = (tl.constexpr(c) for c in (rule.T_LOW, rule.T_HIGH, rule.TAU_0))
_BASE_TEMP, _WINDOW = tl.constexpr(rule.BASE_TEMP), tl.constexpr(rule.WINDOW)
_POLICY, _ESTIMATOR = tl.constexpr(rule.POLICY), tl.constexpr(rule.ESTIMATOR)
_THRESHOLD, _SLIDING = (tl.constexpr(POLICIES.index(p)) for p in ("threshold", "sliding"))
_RELATIVE, _UNIFORM = (tl.constexpr(POLICIES.index(p)) for p in ("relative", "uniform"))
_FIXED = tl.constexpr(POLICIES.index("fixed"))
_BY_WINDOW, _BY_STEP = (tl.constexpr(ESTIMATORS.index(e)) for e in ("window", "causal"))
_BY_EMA = tl.constexpr(ESTIMATORS.index("ema"))


@triton.jit
def decide(params, run_sum, window_sum, step_sum, ema, count, step_count, entropy, leaving):
    """`reset.rule.decide_rows`, where `params` points at the row of parameters.

    Returns temperature, threshold, H_step, H_bar, and the new run_sum, window_sum and ema; the sums
    and counts of the step are the caller's to advance.
    """
    t_low = tl.load(params + _T_LOW)
    t_high = tl.load(params + _T_HIGH)
    tau_0 = tl.load(params + _TAU_0)
    window = tl.load(params + _WINDOW)
    policy = tl.load(params + _POLICY).to(tl.int32)
    estimator = tl.load(params + _ESTIMATOR).to(tl.int32)

    seen = count > 0.0
    counted = tl.where(seen, count, 1.0)
    window_mean = tl.where(seen, window_sum / tl.where(counted < window, counted, window), entropy)
    step_counted = tl.where(step_count > 0.0, step_count, 1.0)
    step_mean = tl.where(step_count > 0.0, step_sum / step_counted, entropy)
    step_entropy = tl.where(step_count >= window, step_mean, window_mean)
    step_entropy = tl.where(estimator == _BY_WINDOW, window_mean, step_entropy)
    step_entropy = tl.where(estimator == _BY_STEP, step_mean, step_entropy)
    step_entropy = tl.where(estimator == _BY_EMA, tl.where(seen, ema, entropy), step_entropy)
    mean_entropy = tl.where(seen, run_sum / counted, step_entropy)

    confident = step_entropy <= mean_entropy
    threshold = tl.where(confident, tau_0, step_entropy)
    threshold = tl.where(policy == _THRESHOLD, tau_0, threshold)
    threshold = tl.where(policy == _SLIDING, window_mean, threshold)
    threshold = tl.where(policy == _RELATIVE, step_entropy, threshold)
    uniform = tl.where(confident, float("inf"), step_entropy)
    threshold = tl.where(policy == _UNIFORM, uniform, threshold)
    threshold = tl.where(policy == _FIXED, float("nan"), threshold)

    run_sum = run_sum + entropy
    temperature = tl.where(entropy < threshold, t_low, t_high)
    temperature = tl.where(policy == _FIXED, tl.load(params + _BASE_TEMP), temperature)
    temperature = tl.where(run_sum != run_sum, float("nan"), temperature).to(tl.float32)

    window_sum = window_sum + entropy - leaving
    alpha = 2.0 / (window + 1.0)
    ema = tl.where(seen, ema + alpha * (entropy - ema), entropy)
    return temperature, threshold, step_entropy, mean_entropy, run_sum, window_sum, ema
