"""Scales on the inputs of linear layers, folded into the operation before them.

A method such as AWQ multiplies column k of a weight by s[k] and divides input k by it. To leave an
ordinary checkpoint, the division has to happen where the input is made: in the weight of the norm
before q/k/v and before gate/up, in the rows of up_proj for down_proj, in the rows of v_proj for
o_proj. Without rounding the model then computes what it did before.

This module knows names and tensors of decoder layers built like Llama's. It runs no model and
chooses no scale.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nvfp4r.selection import ConversionPlan, module_of

Taker = Literal["norm", "rows"]
"""What a scale is folded into: the weight of a norm, or the rows of a linear layer."""

_LAYER = re.compile(r"(?P<layer>.*\.layers\.\d+)\.(?P<part>.+)")
_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
# part of the decoder layer -> what takes the scales, and the layers that read it
_READERS: tuple[tuple[Taker, str, tuple[str, ...]], ...] = (
    ("norm", "input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("rows", "self_attn.v_proj", ("self_attn.o_proj",)),
    ("norm", "post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ("rows", "mlp.up_proj", ("mlp.down_proj",)),
)
_PARTS = tuple(part for _, _, readers in _READERS for part in readers)


@dataclass(frozen=True)
class FoldPoint:
    """Linear layers that read one input, and what can divide it.

    Attributes:
        readers: modules whose columns are multiplied.
        taker: module that is divided: a norm, or a linear layer by its rows.
        kind: which of the two it is.
        obstacle: why nothing can take the scale, or None.
    """

    readers: tuple[str, ...]
    taker: str
    kind: Taker
    obstacle: str | None


def fold_points(plan: ConversionPlan) -> list[FoldPoint]:
    """Where the scales of every quantised layer could go, decoder layer by decoder layer.

    Raises:
        ValueError: the model is not built like Llama: a quantised layer of another name (experts,
            fused projections), norms that it does not have, or none where one is needed. Names it.
    """
    names: dict[str, set[str]] = {}
    for module in plan.quantised:
        found = _LAYER.fullmatch(module)
        if found is None or found["part"] not in _PARTS:
            raise ValueError(
                f"{module}: awq cannot scale the inputs of this layer, need decoder layers "
                f"whose linear layers are {', '.join(_PARTS)}; exclude it (--exclude; for an "
                "output head leave --quantize-lm-head out), or use another --method"
            )
        names.setdefault(found["layer"], set()).add(found["part"])
    for layer in names:
        _require_two_norms(plan, layer)
    return [
        FoldPoint(
            tuple(f"{layer}.{part}" for part in readers if part in parts),
            f"{layer}.{taker}",
            kind,
            _obstacle(plan, layer, kind, taker, readers, parts),
        )
        for layer, parts in names.items()
        for kind, taker, readers in _READERS
        if parts.intersection(readers)
    ]


def _require_two_norms(plan: ConversionPlan, layer: str) -> None:
    infos = plan.tensors.infos
    for norm in _NORMS[:2]:
        if f"{layer}.{norm}.weight" not in infos:
            raise ValueError(
                f"{layer}: awq needs a tensor {norm}.weight, which takes the scales of the layers "
                "behind it, but there is none; use another --method"
            )
        if f"{layer}.{norm}.bias" in infos:
            raise ValueError(
                f"{layer}.{norm}.bias: awq needs norms without a bias; use another --method"
            )
    for name in infos:
        part = module_of(name).removeprefix(f"{layer}.")
        if name.startswith(f"{layer}.") and "norm" in part and part not in _NORMS:
            raise ValueError(
                f"{name}: awq knows decoder layers with the norms {', '.join(_NORMS)} only, as "
                "another one may read or make the same values; use another --method"
            )


def _obstacle(
    plan: ConversionPlan,
    layer: str,
    kind: Taker,
    taker: str,
    readers: tuple[str, ...],
    parts: set[str],
) -> str | None:
    infos = plan.tensors.infos
    missing = [part for part in readers if part not in parts and f"{layer}.{part}.weight" in infos]
    if missing:
        return f"{missing[0]} reads the same input and is not quantised"
    if kind == "norm":
        return None
    if taker not in parts:
        return f"{taker} is not quantised, so its rows cannot be scaled without rounding them"
    if f"{layer}.{taker}.bias" in infos:
        return f"{taker} has a bias, which cannot be scaled without rounding it"
    outputs = plan.quantised[f"{layer}.{taker}"].shape[0]
    inputs = plan.quantised[f"{layer}.{readers[0]}"].shape[1]
    if outputs != inputs:
        return f"heads are grouped: {outputs} outputs of {taker} make {inputs} inputs"
    return None


def divided_norm(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """A norm's weight divided by `scale`, and by how much it was divided after rounding.

    Args:
        weight: [K], the weight of a norm that multiplies by it.
        scale: [K] float32, > 0.

    Returns:
        divided: [K] in the dtype of `weight`.
        exact: [K] float32, `weight / divided`; 1 where a channel is 0 or would become 0 or
            infinite. Columns multiplied by it undo the division but for float32 rounding.

    Example:
        >>> divided, exact = divided_norm(torch.tensor([1.0, 0.0]), torch.tensor([3.0, 3.0]))
        >>> [round(float(x), 4) for x in (*divided, *exact)]
        [0.3333, 0.0, 3.0, 1.0]
    """
    divided = (weight.double() / scale.double()).to(weight.dtype)
    is_usable = torch.isfinite(divided) & (divided != 0)
    divided = torch.where(is_usable, divided, weight)
    exact = torch.where(is_usable, weight.double() / divided.double(), 1.0)
    return divided, exact.float()


@dataclass(frozen=True)
class Folds:
    """The scales of a whole model.

    Attributes:
        columns: [K] float32 by module: what its columns are multiplied by.
        rows: [N] float32 by module: what its rows are divided by.
        norms: [K] by module, in the norm's dtype: what replaces its weight.
    """

    columns: dict[str, Tensor]
    rows: dict[str, Tensor]
    norms: dict[str, Tensor]

    def applied(self, module: str, weight: Tensor) -> Tensor:
        """The weight [N, K] of a linear layer with its scales, in float32."""
        wide = weight.float()
        if module in self.columns:
            wide = wide * self.columns[module].to(wide.device)
        if module in self.rows:
            wide = wide / self.rows[module].to(wide.device).unsqueeze(1)
        return wide
