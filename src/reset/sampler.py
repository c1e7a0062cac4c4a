"""Entropy, policy and scaling of a batch of logits in one call.

Plain torch on every device. Knows nothing of tokens: the caller says which rows start a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reset.config import GREEDY_TEMPERATURE
from reset.entropy import entropy_nats
from reset.policy import Decision, TemperaturePolicy


def scale_logits(
    logits: Tensor, policy: TemperaturePolicy, new_step: Tensor, slots: Tensor | None = None
) -> Decision:
    """Divide each row of `logits` by its step-aware temperature, in place.

    Args:
        logits: [B, V] float32, bfloat16 or float16: raw, before temperature and truncation. It is
            overwritten.
        policy: holds the history of the requests; advanced by one token.
        new_step: [B] bool, True if the request's previous output token ended a step.
        slots: [B] int64, slot of each row in `policy`; None means row i is slot i.

    Returns:
        The `Decision`: temperatures, thresholds and entropies, [B] each.

    Raises:
        ValueError, TypeError: shape, dtype or device do not fit (before anything is written).
    """
    if logits.ndim != 2:
        raise ValueError(f"logits have shape {tuple(logits.shape)}; [B, V] is needed")
    decision = policy.decide(entropy_nats(logits), new_step, slots)
    apply_temperature(logits, decision.temperature, may_be_greedy=policy.may_be_greedy)
    return decision


def apply_temperature(logits: Tensor, temperature: Tensor, *, may_be_greedy: bool = True) -> None:
    """logits /= temperature, in place, computed in float32.

    A temperature of at most 1e-6 leaves the first largest logit as it is and masks all others with
    -inf: exact argmax, lowest id among equals. 16-bit logits are shifted so that their largest is 0
    before the division, and what falls below the format's range stays at its lowest finite value:
    a small temperature would otherwise overflow (11.06 / 1e-5 exceeds float16).

    Args:
        logits: [B, V] floating-point; overwritten. A masked entry stays masked.
        temperature: [B] float32, >= 0; a NaN makes its row NaN.
        may_be_greedy: False skips the argmax when no temperature can be at most 1e-6.
    """
    greedy = (temperature <= GREEDY_TEMPERATURE).unsqueeze(1)  # [B, 1]
    divisor = torch.where(greedy, 1.0, temperature.unsqueeze(1))
    if may_be_greedy:
        best = logits.argmax(dim=1, keepdim=True)  # [B, 1], the first among equals
        best_logit = logits.gather(1, best)
    if logits.dtype == torch.float32:
        logits.div_(divisor)
    else:
        wide = logits.float()
        top = wide.amax(dim=1, keepdim=True)
        scaled = (wide - torch.where(top == -torch.inf, 0.0, top)) / divisor
        lowest = torch.finfo(logits.dtype).min
        logits.copy_(torch.where(wide == -torch.inf, wide, scaled.clamp(min=lowest)))
    if may_be_greedy:
        logits.masked_fill_(greedy, -torch.inf)
        kept = torch.where(greedy, best_logit, logits.gather(1, best))
        logits.scatter_(1, best, kept)
