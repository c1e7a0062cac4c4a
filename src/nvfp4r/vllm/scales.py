"""Scales of a layer that an engine has fused from several stored ones, before they are merged.

An engine loads the scales of q, k and v, or of gate and up, into one tensor with a slot for each.
Here they become what a layer computes with: a global scale per output row, exact whatever the slots
hold, and one input scale. Nothing here knows vLLM.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4r.format import PartitionScales

_log = logging.getLogger("vllm.nvfp4r")


def shard_names(layer: str, members: Sequence[str] | None, count: int) -> tuple[str, ...]:
    """What the stored modules behind a layer are called.

    Args:
        layer: the layer's own name.
        members: last name components of what it is fused from, None if that is not known.
        count: how many there are.

    Example:
        >>> shard_names("model.layers.0.mlp.gate_up_proj", ["gate_proj", "up_proj"], 2)
        ('model.layers.0.mlp.gate_proj', 'model.layers.0.mlp.up_proj')
        >>> shard_names("in_proj", None, 2)
        ('in_proj[0]', 'in_proj[1]')
    """
    if count == 1:
        return (layer,)
    if members is None or len(members) != count:
        return tuple(f"{layer}[{index}]" for index in range(count))
    parent, dot, _ = layer.rpartition(".")
    return tuple(f"{parent}{dot}{member}" for member in members)


def row_scales(
    slots: Tensor, rows: Sequence[int], names: Sequence[str], stores_divisors: bool
) -> Tensor:
    """The global scale of every output row.

    Args:
        slots: [len(rows)] float32 as stored, NaN where nothing was loaded.
        rows: output rows of each slot.
        names: full tensor names, for errors.
        stores_divisors: whether the slots hold reciprocals.

    Returns:
        [sum(rows)] float32 multipliers on the CPU.

    Raises:
        ValueError: a scale is missing (a single one in slot 0 is that of the whole layer), zero,
            negative or infinite; names the tensor.
    """
    scales = PartitionScales(rows, names=names)
    for index, value in enumerate(_multipliers(slots, names, stores_divisors)):
        if value is not None:
            scales.load(index, value)
    return scales.per_row()


def input_scale(slots: Tensor, names: Sequence[str], stores_divisors: bool) -> Tensor:
    """The one scale that a layer's input is rounded with: float32 [], a multiplier, on the CPU.

    What a layer is fused from has the same input, so calibration gives it the same scale. Where a
    checkpoint says otherwise the largest one is taken, under which nothing saturates that did not
    before, and a warning tells so.

    Raises:
        ValueError: missing (a single one in slot 0 is that of the whole layer), zero, negative or
            infinite; names the tensor.
    """
    loaded = _multipliers(slots, names, stores_divisors)
    lost = [name for name, value in zip(names, loaded, strict=True) if value is None]
    if loaded[0] is None or 0 < len(lost) < len(loaded) - 1:
        raise ValueError(
            f"{', '.join(lost)} missing, but activations are to be rounded to NVFP4; need one for "
            "every layer, or a single one for a fused layer. Is the checkpoint complete? "
            "activations='none' needs none"
        )
    found = torch.stack([value for value in loaded if value is not None])
    if found.min() != found.max():
        _log.warning(
            "%s differ (%s); the input of a fused layer is rounded once, with the largest",
            ", ".join(names),
            ", ".join(f"{value:g}" for value in found.tolist()),
        )
    return found.max()


def _multipliers(slots: Tensor, names: Sequence[str], stores_divisors: bool) -> list[Tensor | None]:
    kind = "divisor" if stores_divisors else "multiplier"
    values: list[Tensor | None] = []
    for name, value in zip(names, slots.detach().float().cpu().reshape(-1), strict=True):
        if math.isnan(value):
            values.append(None)
            continue
        multiplier = 1.0 / value if stores_divisors else value.clone()
        if not all(math.isfinite(x) and x > 0 for x in (value, multiplier)):
            raise ValueError(
                f"{name} is {float(value)}, need a finite {kind} > 0 with a finite reciprocal; the "
                "export is damaged, quantise the layer again"
            )
        values.append(multiplier)
    return values
