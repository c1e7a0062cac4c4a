"""Inputs for attention, its float64 reference, and how far from that rounding may lead."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lab.pocket_reasoner.attention import new_cells
from torch import Tensor

SCALING = 0.25
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass
class Case:
    """What `attend` takes, and what is known about the answer, in float64."""

    q: Tensor
    keys: Tensor
    values: Tensor
    position: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        return self.q, self.keys, self.values, self.position, SCALING

    def poison(self, value: float) -> None:
        """Overwrite the values of all cells that must not be seen, and their keys with NaN."""
        cells = torch.arange(self.values.shape[2], device=self.values.device)
        unseen = (cells > self.position[:, None])[:, None, :, None]
        self.keys.masked_fill_(unseen.mT, torch.nan)
        self.values.masked_fill_(unseen, value)


def make_case(
    position: list[int],
    length: int,
    *,
    group: int = 2,
    kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Case:
    """Random numbers; scores spread over -8 .. 8 or so: some weights are far from others."""
    generator = torch.Generator().manual_seed(7)
    rows = len(position)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    like = torch.empty(0, dtype=dtype, device=device)
    keys, values = new_cells(like, rows, kv_heads, head_dim, length)
    keys.copy_(random(*keys.shape))
    values.copy_(random(*values.shape))
    q = random(rows, kv_heads * group, head_dim) * (2 / SCALING / head_dim**0.5)
    return Case(q, keys, values, torch.tensor(position, device=device))


def check(found: Tensor, case: Case, *, rounds: bool, store: float = 0.5) -> None:
    """Hold a result to the reference, number by number, with a bound that cannot be exceeded.

    With u the largest relative error of rounding to the dtype, and v that of float32:
    a score of the sum of n products is off by at most n v times the sum of their absolute values;
    scores off by e change weights by a factor within exp(2 e); sums of L weighted values add L v.
    What is stored is rounded once more.

    Args:
        rounds: scores (twice: product, scaling) and weights are rounded to the dtype as well.
        store: rounding of the result, in units of eps; Triton's interpreter cuts off bfloat16,
            which needs 1.
    """
    q, keys, values = (tensor.double() for tensor in (case.q, case.keys, case.values))
    info, single = torch.finfo(case.q.dtype), torch.finfo(torch.float32).eps
    unit = info.eps / 2
    expected = torch.empty_like(q)
    bound = torch.empty_like(q)
    group = q.shape[1] // keys.shape[1]
    for row, last in enumerate(case.position.tolist()):
        for head in range(q.shape[1]):
            key = keys[row, head // group, :, : last + 1]  # [d, cells]
            value = values[row, head // group, : last + 1]
            scores = q[row, head] @ key * SCALING
            magnitude = (q[row, head].abs() @ key.abs() * SCALING).max()
            weights = scores.softmax(0)
            expected[row, head] = weights @ value
            off = (len(key) + 8) * single * magnitude
            if rounds:
                off = off + 2 * unit * scores.abs().max()
            relative = torch.expm1(2 * off) + (last + 16) * single + (unit if rounds else 0)
            bound[row, head] = relative * (weights @ value.abs())
            if rounds:  # weights below the dtype's normal numbers
                bound[row, head] += info.smallest_normal * unit * value.abs().sum(0)
    bound += 2 * store * unit * (expected.abs() + bound)
    error = (found.double() - expected).abs()
    assert found.dtype == case.q.dtype
    assert (error <= bound).all(), f"{(error / bound).max():.2f} times the bound"
