"""tau_0 of a model: a percentile of its own token entropies, with what it came from.

Knows numbers, not models: the caller decodes the problems and hands over raw-logit entropies, made
by the same code as the sampler's. Entropies from generate()'s `scores` or from top-k logprobs are
not comparable (tempered, truncated or capped).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from reset.files import written_aside

DEFAULT_PERCENTILE = 80.0
"""As published: tau_0 is the 80th percentile over a handful of held-out problems."""


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


@dataclass(frozen=True)
class Calibration:
    """A threshold and its provenance, as `reset-calibrate` writes it.

    `config` holds what `ReSETConfig.from_file` reads: tau_0, and t_low / t_high where chosen.
    """

    config: dict[str, float]
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

    def write(self, path: Path) -> None:
        """Write as JSON; the file is whole or absent."""
        with written_aside(path) as partial:
            partial.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


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
