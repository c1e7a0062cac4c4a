"""Entropy, policy and scaling of a batch of logits in one call.

Triton kernels on CUDA, plain torch elsewhere, with one contract; the torch path is the reference.
Knows nothing of tokens: the caller says which rows start a step.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from reset.config import GREEDY_TEMPERATURE
from reset.entropy import entropy_nats
from reset.policy import Decision, TemperaturePolicy

Backend = Literal["auto", "torch", "triton"]


def scale_logits(
    logits: Tensor,
    policy: TemperaturePolicy,
    new_step: Tensor,
    slots: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Decision:
    """Divide each row of `logits` by its step-aware temperature, in place.

    On CUDA it can be captured in a CUDA graph after a first call with the largest batch; a slot
    that does not exist then makes its row NaN, where the torch path raises an IndexError.

    Args:
        logits: [B, V] float32, bfloat16 or float16: raw, before temperature and truncation. It is
            overwritten.
        policy: holds the history of the requests; advanced by one token.
        new_step: [B] bool, True if the request's previous output token ended a step.
        slots: [B] int64, slot of each row in `policy`; None means row i is slot i.
        backend: "triton", "torch", or "auto": Triton on CUDA where it is installed.

    Returns:
        The `Decision`: temperatures, thresholds and entropies, [B] each.

    Raises:
        ValueError, TypeError: shape, dtype or device do not fit (before anything is written).
    """
    if logits.ndim != 2:
        raise ValueError(f"logits have shape {tuple(logits.shape)}; [B, V] is needed")
    if choose_backend(backend, policy.device) == "triton":
        check_logits(logits)
        policy.check_rows("logits", logits, new_step, slots)
        if policy.kernels is None:
            from reset._triton_launch import PolicyKernels

            policy.kernels = PolicyKernels(policy)
        fused: Decision = policy.kernels.scale(logits, slots, new_step)
        return fused
    decision = policy.decide(entropy_nats(logits), new_step, slots)
    apply_temperature(logits, decision.temperature, may_be_greedy=policy.may_be_greedy)
    return decision


def check_logits(logits: Tensor) -> None:
    """Raise unless `logits` is [B, V >= 1] of a dtype that can be scaled."""
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"logits have dtype {logits.dtype}; float32, bfloat16 or float16 is needed")
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits have shape {tuple(logits.shape)}; [B, V] with V >= 1 is needed")


def choose_backend(backend: str, device: torch.device) -> str:
    """ "torch" or "triton"; "auto" is Triton on CUDA where it is installed."""
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend is {backend!r}; it must be auto, torch or triton")
    if backend != "auto":
        return backend
    return "triton" if device.type == "cuda" and _triton_is_installed() else "torch"


@cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def apply_temperature(
    logits: Tensor,
    temperature: Tensor,
    *,
    may_be_greedy: bool = True,
    own_temperature: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    """logits /= temperature, in place, computed in float32.

    A temperature of at most 1e-6 leaves the first largest logit as it is and masks all others with
    -inf: exact argmax, lowest id among equals. 16-bit logits are shifted so that their largest is 0
    before the division, and what falls below the format's range stays at its lowest finite value:
    a small temperature would otherwise overflow (11.06 / 1e-5 exceeds float16).

    Args:
        logits: [B, V] floating-point; overwritten. A masked entry stays masked.
        temperature: [B] float32, >= 0; a NaN makes its row NaN.
        may_be_greedy: False skips the argmax when no temperature can be at most 1e-6.
        own_temperature: [B] float32, by which somebody divides afterwards: each row is divided by
            temperature / own_temperature instead, so that the later division leaves `temperature`.
        rows: [B] bool, the rows to scale; the others stay as they are, bit for bit. Default: all.
    """
    greedy = (temperature <= GREEDY_TEMPERATURE).unsqueeze(1)  # [B, 1]
    divisor = temperature if own_temperature is None else temperature / own_temperature
    divisor = torch.where(greedy, 1.0, divisor.unsqueeze(1))
    before = logits.clone() if rows is not None else logits
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
    if rows is not None:
        logits.copy_(torch.where(rows.unsqueeze(1), logits, before))
