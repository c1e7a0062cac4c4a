"""Attention of one token a row over the row's cached cells: in torch, or in a Triton kernel.

Knows neither layers nor sampling. The torch path reads every cell and masks those that are not to
be seen; the kernel (attention_kernel.py), taken on CUDA where Triton is installed, reads a row's
own cells alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reset.sampler import choose_backend


def new_cells(like: Tensor, rows: int, heads: int, head_dim: int, length: int) -> list[Tensor]:
    """Keys [rows, heads, head_dim, length] and values [rows, heads, length, head_dim], all zeros.

    Dtype and device are those of `like`. Zeros, because a masked cell is multiplied by 0, which
    must not meet NaN. On a CPU the keys lie as the product with a query reads them, which is three
    times as fast there; elsewhere a cell's numbers lie side by side, as the kernel needs them.
    """
    values = like.new_zeros((rows, heads, length, head_dim))
    if like.device.type == "cpu":
        return [like.new_zeros((rows, heads, head_dim, length)), values]
    return [torch.zeros_like(values).mT, values]


def attend(q: Tensor, keys: Tensor, values: Tensor, position: Tensor, scaling: float) -> Tensor:
    """Weighted values [B, heads, d] of cells 0 .. position of each row, in the dtype of `values`.

    Sums and the softmax are float32. What lies in the other cells changes nothing, as long as it is
    finite. Waits for nothing, so that a CUDA graph can hold it.

    Args:
        q: [B, heads, d], of the dtype of keys and values; heads a multiple of KV. Query head h sees
            key-value head h // (heads / KV).
        keys: [B, KV, d, length], from `new_cells`.
        values: [B, KV, length, d].
        position: [B] int64, in 0 .. length - 1.
        scaling: of the scores; 1 / sqrt(d) as a rule.
    """
    if choose_backend("auto", q.device) == "triton":
        from lab.pocket_reasoner.attention_kernel import attend_seen

        return attend_seen(q, keys, values, position, scaling)
    return attend_masked(q, keys, values, position, scaling)


def attend_masked(
    q: Tensor, keys: Tensor, values: Tensor, position: Tensor, scaling: float
) -> Tensor:
    """`attend` in torch. Scores and weights are rounded to the dtype of `values` on the way."""
    cells = torch.arange(keys.shape[3], device=keys.device)
    unseen = (cells > position.unsqueeze(1))[:, None, None, :]  # [B, 1, 1, length]
    grouped = q.unflatten(1, (keys.shape[1], -1))  # [B, KV, group, d]
    scores = grouped @ keys * scaling  # [B, KV, group, length]
    weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1, dtype=torch.float32)
    return (weights.to(values.dtype) @ values).flatten(1, 2)
