"""tau_0 of a model: a percentile of its own token entropies, its interval, and what it came from.

Knows numbers, not models: the caller decodes the problems and hands over raw-logit entropies, made
by the same code as the sampler's. Entropies from generate()'s `scores` or from top-k logprobs are
not comparable (tempered, truncated or capped).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from reset.presets import read_entry, write_entry

DEFAULT_PERCENTILE = 80.0
"""As published: tau_0 is the 80th percentile over a handful of held-out problems."""

RESAMPLES = 2_000


def percentile_threshold(
    entropies: Sequence[Sequence[float]], percentile: float = DEFAULT_PERCENTILE
) -> float:
    """tau_0 in nats: the percentile of all tokens of all problems, pooled; linear interpolation.

    Args:
        entropies: per problem, H_t of every output token, in nats.
        percentile: 0 .. 100.

    Raises:
        ValueError: no tokens, a percentile out of range, or an entropy that is negative or not
            finite (the problem is named).

    Example:
        >>> round(percentile_threshold([[0.0] * 80 + [1.0] * 20]), 4)
        0.2
    """
    if not 0 <= percentile <= 100:
        raise ValueError(f"percentile is {percentile}; it must be between 0 and 100")
    for number, tokens in enumerate(entropies):
        if any(not math.isfinite(value) or value < 0 for value in tokens):
            raise ValueError(f"problem {number}: entropies must be finite and >= 0 nats")
    pooled = [value for tokens in entropies for value in tokens]
    if not pooled:
        raise ValueError("there are no tokens to take a percentile of; pass decoded problems")
    return float(np.percentile(pooled, percentile, method="linear"))


def threshold_interval(
    entropies: Sequence[Sequence[float]],
    percentile: float = DEFAULT_PERCENTILE,
    *,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[float, float] | None:
    """How far tau_0 would move with other problems: a bootstrap interval over problems, in nats.

    Whole problems are drawn with replacement, 2,000 times with `seed`, since the tokens of one
    problem are not independent. A handful of problems makes it too narrow rather than too wide.

    Args:
        entropies, percentile: as `percentile_threshold`.
        level: share of the resamples inside, (0, 1).

    Returns:
        Low and high end; None for fewer than two problems, which tell nothing about others.

    Raises:
        ValueError: as `percentile_threshold`, or a level out of range.
    """
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must be between 0 and 1")
    percentile_threshold(entropies, percentile)
    told = [tokens for tokens in entropies if len(tokens)]
    if len(told) < 2:
        return None
    pooled = np.concatenate([np.asarray(tokens, dtype=np.float64) for tokens in told])
    order = np.argsort(pooled, kind="stable")
    values = pooled[order]
    owners = np.repeat(np.arange(len(told)), [len(tokens) for tokens in told])[order]
    generator = np.random.default_rng(seed)
    found = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        drawn = generator.integers(0, len(told), len(told))
        times = np.bincount(drawn, minlength=len(told))
        found[number] = _repeated_percentile(values, times[owners], percentile)
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _repeated_percentile(values: np.ndarray, times: np.ndarray, percentile: float) -> float:
    """`np.percentile` of sorted `values` [T], each as often as `times` [T] says."""
    ends = np.cumsum(times)
    place = (ends[-1] - 1) * percentile / 100
    below = int(place)
    above = min(below + 1, int(ends[-1]) - 1)
    one, two = values[np.searchsorted(ends, [below, above], side="right")]
    return float(one + (two - one) * (place - below))


@dataclass(frozen=True)
class Calibration:
    """A threshold and its provenance, as `reset-calibrate` writes it.

    `config` holds what `ReSETConfig.from_file` reads: tau_0, and what the search recommends or the
    user chose. `problems` are those that tau_0 came from; those of the search are apart, in
    `search["problems"]`. `recommendation` is the sentence that the search ended in.
    """

    config: dict[str, Any]
    percentile: float
    model: str
    model_sha256: str
    quantisation: dict[str, Any]
    data: str
    problems: list[str]  # sha256 of each problem's text, so that evaluation can stay apart
    tokens: list[int]
    truncated: int
    sampling: dict[str, Any]
    versions: dict[str, str]
    rule: str = field(default="numpy linear percentile of pooled raw-logit token entropies, nats")
    tau_0_interval: dict[str, float] | None = None  # 95 %, bootstrap over problems
    recommendation: str | None = None
    search: dict[str, Any] | None = None

    def write(self, path: Path, name: str | None = None) -> None:
        """Write as JSON, alone or as one of several by name; the file is whole or as it was."""
        write_entry(path, asdict(self), name)

    @classmethod
    def read(cls, path: Path, name: str | None = None) -> Calibration:
        """The inverse of `write`.

        Raises:
            ValueError: not such a file, or one that a person wrote: its provenance is missing.
            OSError: no such file.
        """
        entry = read_entry(path, name)
        legal = {one.name for one in fields(cls)}
        needed = {one.name for one in fields(cls) if one.default is MISSING}
        missing, unknown = sorted(needed - set(entry)), sorted(set(entry) - legal)
        if missing or unknown:
            raise ValueError(
                f"{path}: is no calibration of this version (missing: {missing}, unknown: "
                f"{unknown}); calibrate again"
            )
        return cls(**entry)


def text_sha256(text: str) -> str:
    """Identity of a problem; surrounding white space does not count."""
    return hashlib.sha256(text.strip().encode()).hexdigest()


def folder_sha256(folder: Path) -> str:
    """Identity of a model: config.json and every weight file, names and content."""
    files = sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")])
    if not files:
        raise ValueError(f"{folder}: neither config.json nor safetensors files to identify it by")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()
