"""Module names: which layers engines fuse, and what an exclusion pattern covers.

Engines stack q/k/v and gate/up into one matrix, so the members of such a group must be quantised
together or not at all, and should share a global scale. Exclusion lists name layers exactly, with
globs, with regular expressions (`re:`), or by the name that the fused layer has in an engine.

This module sees names only: no tensors, no files.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FusedFamily:
    """One spelling of a group: the members' last name components, and what engines call it."""

    members: tuple[str, ...]
    fused: tuple[str, ...]


FAMILIES: tuple[FusedFamily, ...] = (
    FusedFamily(("q_proj", "k_proj", "v_proj"), ("qkv_proj",)),
    FusedFamily(("to_q", "to_k", "to_v"), ("to_qkv", "qkv_proj")),
    FusedFamily(("wq", "wk", "wv"), ("wqkv", "qkv_proj")),
    FusedFamily(("query", "key", "value"), ("query_key_value", "qkv_proj")),
    FusedFamily(("gate_proj", "up_proj"), ("gate_up_proj",)),
    FusedFamily(("w1", "w3"), ("w13", "gate_up_proj")),
)

_FAMILY_OF = {member: family for family in FAMILIES for member in family.members}


def _split(name: str) -> tuple[str, str]:
    """("model.layers.0.mlp.", "up_proj") for "model.layers.0.mlp.up_proj"."""
    parent, dot, last = name.rpartition(".")
    return parent + dot, last


def fused_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Groups of modules that engines fuse into one matrix.

    Members are siblings under one parent. A group is reported when two or more of its members are
    there; members come in the order in which engines stack them (q, k, v; gate, up), groups in the
    order of their first member in `names`.

    Args:
        names: module names, e.g. "model.layers.0.self_attn.q_proj".

    Example:
        >>> fused_groups(["attn.to_v", "attn.to_q", "attn.to_k", "attn.to_out"])
        [('attn.to_q', 'attn.to_k', 'attn.to_v')]
    """
    found: dict[tuple[str, FusedFamily], set[str]] = {}
    for name in names:
        parent, last = _split(name)
        family = _FAMILY_OF.get(last)
        if family is not None:
            found.setdefault((parent, family), set()).add(last)
    return [
        tuple(parent + member for member in family.members if member in members)
        for (parent, family), members in found.items()
        if len(members) >= 2
    ]


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error as error:
            raise ValueError(
                f"exclusion pattern {pattern!r} is not a valid regular expression ({error}); "
                "correct it, or write a glob without the 're:' prefix"
            ) from None
    if any(mark in pattern for mark in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    if pattern == "lm_head":
        return name == pattern or name.endswith(".lm_head")
    return name == pattern or name.startswith(pattern + ".")


def _covers(name: str, pattern: str) -> bool:
    if _matches(name, pattern):
        return True
    parent, last = _split(name)
    family = _FAMILY_OF.get(last)
    if family is None:
        return False
    # "*v_proj" also fits "qkv_proj", but speaks of v_proj alone: a pattern that fits a member is
    # not about the fused layer.
    if any(_matches(parent + member, pattern) for member in family.members):
        return False
    return any(_matches(parent + fused, pattern) for fused in family.fused)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether an exclusion list covers a module.

    A pattern is one of

    * a name: covers that module and everything below it ("model.visual"); "lm_head" also covers a
      head below another parent ("language_model.lm_head");
    * a glob with `*`, `?` or `[...]`, over the whole name; `*` crosses dots;
    * "re:" and a regular expression, matched from the start of the name (compressed-tensors);
    * any of these for the fused layer's name, if it fits no member's own name: "*.qkv_proj" covers
      q_proj, k_proj and v_proj; "*v_proj" covers v_proj alone.

    Args:
        name: module name, without ".weight".
        patterns: the exclusion list.

    Raises:
        ValueError: a regular expression is malformed.
    """
    return any(_covers(name, pattern) for pattern in patterns)


def exclusion_problems(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """One message for each fused group of which `patterns` cover only a part.

    Args:
        names: every linear module, excluded or not.
        patterns: the exclusion list.
    """
    problems = []
    for group in fused_groups(names):
        excluded = [name for name in group if matches_any(name, patterns)]
        kept = [name for name in group if name not in excluded]
        if excluded and kept:
            parent, last = _split(group[0])
            problems.append(
                f"the exclusion list covers {', '.join(excluded)} but not {', '.join(kept)}; "
                "engines fuse them into one matrix, which is quantised as a whole or not at all. "
                f"Exclude {parent}{_FAMILY_OF[last].fused[0]} (all of them), or none"
            )
    return problems


def check_exclusions(names: Iterable[str], patterns: Sequence[str]) -> None:
    """Refuses an exclusion list that covers only a part of a fused group.

    Args:
        names: every linear module, excluded or not.
        patterns: the exclusion list.

    Raises:
        ValueError: names the covered and the uncovered members of the first such group.
    """
    problems = exclusion_problems(names, patterns)
    if problems:
        raise ValueError(problems[0])
