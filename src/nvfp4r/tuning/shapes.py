"""Which matrices `nvfp4r bench` measures: a checkpoint's as engines fuse them, or given ones.

Plain data and names; reads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nvfp4r.checkpoint import NVFP4Checkpoint
from nvfp4r.format import BLOCK
from nvfp4r.groups import fused_groups
from nvfp4r.naming import group_pattern, layer_pattern


@dataclass(frozen=True)
class Shape:
    """A matrix of N outputs and K inputs, and which layers have it."""

    name: str
    N: int
    K: int

    def __str__(self) -> str:
        return f"{self.N}x{self.K}"


QWEN3_8B = (
    Shape("Qwen3-8B qkv_proj", 6144, 4096),
    Shape("Qwen3-8B o_proj", 4096, 4096),
    Shape("Qwen3-8B gate_up_proj", 24576, 4096),
    Shape("Qwen3-8B down_proj", 4096, 12288),
)


def parse_shape(text: str) -> Shape:
    """A shape from "NxK".

    Raises:
        ValueError: anything else, N < 1, or K not a positive multiple of 16.

    Example:
        >>> parse_shape("6144x4096")
        Shape(name='given', N=6144, K=4096)
    """
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    N, K = map(int, found.groups()) if found else (0, 0)
    if N < 1 or K < BLOCK or K % BLOCK:
        raise ValueError(
            f"--shape: got {text!r}, need outputs x inputs such as 6144x4096, with inputs a "
            f"multiple of {BLOCK}"
        )
    return Shape("given", N, K)


def parse_tokens(text: str) -> tuple[int, ...]:
    """Numbers of tokens from "1,8,16", ascending and each once.

    Raises:
        ValueError: anything else, or a number below 1.
    """
    if not re.fullmatch(r"\d+(,\d+)*", text) or min(map(int, text.split(","))) < 1:
        raise ValueError(f"--tokens: got {text!r}, need numbers >= 1 such as 1,8,16")
    return tuple(sorted(set(map(int, text.split(",")))))


def checkpoint_shapes(checkpoint: NVFP4Checkpoint) -> tuple[Shape, ...]:
    """The different matrices of a checkpoint's quantised modules, q/k/v and gate/up fused.

    Layers of one size share a shape, which names them all.

    Raises:
        ValueError: nothing is quantised.
    """
    groups = fused_groups(checkpoint.modules)
    fused = {member for group in groups for member in group}
    alone = [(module,) for module in checkpoint.modules if module not in fused]
    names: dict[tuple[int, int], list[str]] = {}
    for group in (*groups, *alone):
        sizes = [checkpoint.info(f"{module}.weight").shape for module in group]
        N, K = sum(N for N, _ in sizes), sizes[0][1]
        names.setdefault((N, K), []).append(_short_name(group))
    if not names:
        raise ValueError(
            f"{checkpoint.path}: no module is quantised, so there is nothing to measure; give "
            "shapes with --shape"
        )
    return tuple(Shape(", ".join(dict.fromkeys(n)), *size) for size, n in names.items())


def _short_name(group: Sequence[str]) -> str:
    """Without what comes before the number of its layer: "self_attn.{q_proj,k_proj,v_proj}"."""
    name = layer_pattern(group[0]) if len(group) == 1 else group_pattern(tuple(group))
    return name.rpartition("*.")[2]
