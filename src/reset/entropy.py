"""Shannon entropy of a row of logits, in nats. Knows nothing of policies or engines."""

from __future__ import annotations

import torch
from torch import Tensor


def entropy_nats(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) along the last dimension, in nats, computed in float32.

    A masked entry (-inf) has probability 0 and adds nothing. A row in which every entry is masked
    has entropy 0. A NaN or +inf entry makes the row's entropy NaN; it is never repaired.

    Args:
        logits: [..., V] float32, bfloat16 or float16; raw, before any temperature or truncation.

    Returns:
        [...] float32, 0 .. log(V).

    Raises:
        TypeError: `logits` is not a floating-point tensor.
        ValueError: it has no last dimension, or V is 0.

    Example:
        >>> entropy_nats(torch.zeros(1000))
        tensor(6.9078)
        >>> entropy_nats(torch.tensor([0.0, 0.0, float("-inf")]))
        tensor(0.6931)
    """
    if not logits.is_floating_point():
        raise TypeError(f"logits have dtype {logits.dtype}; a floating-point tensor is needed")
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits have shape {tuple(logits.shape)}; [..., V] with V >= 1 is needed")
    z = logits.float()
    top = z.amax(dim=-1, keepdim=True)  # [..., 1]
    # A fully masked row has top = -inf, and -inf - -inf is NaN: shift it by 0 instead.
    shifted = z - torch.where(top == -torch.inf, 0.0, top)
    weight = shifted.exp()  # [..., V], 0 where masked
    total = weight.sum(dim=-1)
    # 0 * -inf is NaN where an entry is masked: such a term is 0 by definition.
    weighted = torch.where(shifted == -torch.inf, 0.0, weight * shifted).sum(dim=-1)
    entropy = total.log() - weighted / total
    # Rounding may leave -1e-8 for a one-hot row; NaN passes through clamp.
    entropy = entropy.clamp(min=0.0)
    return torch.where(top.squeeze(-1) == -torch.inf, 0.0, entropy)
