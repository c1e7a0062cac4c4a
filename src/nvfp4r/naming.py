"""Short names for the many modules of a model, for tables and reports."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable


def layer_pattern(name: str) -> str:
    """The name with its layer numbers replaced: "model.layers.*.mlp.up_proj".

    Example:
        >>> layer_pattern("h.0.attn.q_proj"), layer_pattern("model.layers.11.experts.3.w1")
        ('h.*.attn.q_proj', 'model.layers.*.experts.*.w1')
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def group_pattern(group: tuple[str, ...]) -> str:
    """One name for several siblings: "model.layers.*.self_attn.{q_proj,k_proj,v_proj}"."""
    parents, members = zip(*(name.rpartition(".")[::2] for name in group), strict=True)
    return layer_pattern(f"{parents[0]}.x")[:-1].lstrip(".") + "{" + ",".join(members) + "}"


def counted(patterns: Iterable[str]) -> list[str]:
    """Each distinct pattern with how often it occurs: "model.layers.*.mlp.up_proj x 30"."""
    return [
        f"{pattern} x {count}" if count > 1 else pattern
        for pattern, count in Counter(patterns).items()
    ]


def plural(count: int, noun: str) -> str:
    """ "1 scale", "2 scales"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
