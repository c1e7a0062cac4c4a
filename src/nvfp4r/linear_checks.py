"""Checks of what an NVFP4 layer is given beside its weight; they read values and change nothing.

What makes a weight sound is format.py's business.
"""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from nvfp4r.methods.rotation import Rotation


def check_vectors(name: str, N: int, bias: Tensor | None, input_scale: Tensor | None) -> None:
    """Refuses a bias or an input scale that a layer of N outputs cannot have.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, or an input scale that is not a finite number > 0.
    """
    if bias is not None:
        if not bias.is_floating_point():
            raise TypeError(f"{name}: bias has dtype {bias.dtype}, need floating point")
        if tuple(bias.shape) != (N,):
            raise ValueError(f"{name}: bias has shape {list(bias.shape)}, need [{N}]")
    if input_scale is not None:
        if input_scale.dtype != torch.float32:
            raise TypeError(
                f"{name}: input_scale has dtype {input_scale.dtype}, need torch.float32"
            )
        if input_scale.ndim != 0:
            raise ValueError(f"{name}: input_scale has shape {list(input_scale.shape)}, need []")
        if not (math.isfinite(float(input_scale)) and float(input_scale) > 0):
            raise ValueError(
                f"{name}: input_scale is {float(input_scale)}, need a finite multiplier > 0; "
                "derive it with global_scale_from_amax"
            )


def check_same_part(name: str, field: str, old: Tensor | None, new: Tensor | None) -> None:
    """Raises ValueError if only one of a layer and what replaces it has `field`."""
    if (old is None) != (new is None):
        got, has = ("none", "one") if new is None else ("one", "none")
        raise ValueError(
            f"{name}: got {got} as new {field}, but the layer has {has}; pass what the layer "
            "holds, or build a new layer"
        )


def check_rotation(name: str, rotation: str | None) -> None:
    """Raises ValueError for a rotation that there is none of."""
    if rotation is not None and rotation not in get_args(Rotation):
        raise ValueError(
            f"{name}: rotation is {rotation!r}, need one of {get_args(Rotation)} or None"
        )
