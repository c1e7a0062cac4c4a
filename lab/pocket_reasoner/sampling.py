"""Drawing tokens for many rows at once, each with random numbers of its own.

A row's numbers depend on its seed and on how many it has drawn, on nothing beside it. All on the
device; nothing waits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number
_FIRST, _SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def uniform(seed: Tensor, count: Tensor) -> Tensor:
    """[B] float64 in [0, 1): number `count` of each `seed`, both [B] int64.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of a counter. 53 random bits.
    """
    x = _mixed(seed * _GOLDEN) + (count + 1) * _GOLDEN  # integers wrap around, as they should
    return _shifted(_mixed(x), 11).double() * 2.0**-53


def draw(logits: Tensor, top_p: Tensor, chance: Tensor) -> Tensor:
    """One token a row from logits that are scaled already.

    The nucleus is the smallest set of likeliest tokens that holds `top_p` of the probability, the
    lowest ids first among equals, as in transformers; a row with one token left takes that.

    Args:
        logits: [B, V] floating point.
        top_p: [B], 0 < top_p <= 1.
        chance: [B] float64 from `uniform`.

    Returns:
        [B] int64. Without meaning for a row that holds NaN.
    """
    probability = logits.double().softmax(dim=1)
    ordered, ids = probability.sort(dim=1, descending=True, stable=True)
    above = ordered.cumsum(dim=1) - ordered  # of the likelier ones
    kept = torch.where(above < top_p.unsqueeze(1), ordered, 0.0)
    total = kept.cumsum(dim=1)  # [B, V]
    place = (total <= chance.unsqueeze(1) * total[:, -1:]).sum(dim=1, keepdim=True)
    # Rounding could push the place behind the last token that was kept.
    place = torch.minimum(place, (kept > 0).sum(dim=1, keepdim=True) - 1).clamp(min=0)
    return ids.gather(1, place).squeeze(1)


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Right shift that fills with zeros; torch's fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
