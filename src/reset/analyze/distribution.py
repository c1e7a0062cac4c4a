"""How the entropies of a model's tokens are distributed, over value and over output position.

Knows records and numbers; draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reset.analyze.dump import ENTROPY_RULE, Dump
from reset.analyze.replay import PERCENTILE_RULE
from reset.analyze.study import Row, Study, rounded

PERCENTILES = (1, 5, 10, 25, 50, 75, 80, 90, 95, 99)
_POSITIONS = (0, 64, 256, 1024, 4096, 16384)
_NGRAM = 8
_MEASURED = "whole sequence"


def distribution(dumps: Sequence[Dump], bin_width_nats: float = 0.1) -> Study:
    """Histogram, percentiles and course over the output position of each dump.

    Args:
        dumps: each with at least one answer.
        bin_width_nats: of the histogram, > 0.

    Raises:
        ValueError: the bin width is not positive, or an answer file is damaged.
    """
    if not bin_width_nats > 0:
        raise ValueError(f"the bin width is {bin_width_nats} nats; it must be above 0")
    pooled: list[np.ndarray] = []
    percentiles: list[Row] = []
    positions: list[Row] = []
    for number, dump in enumerate(dumps):
        answers = list(dump.answers())
        entropies = np.concatenate([answer.entropy_nats for answer in answers])
        pooled.append(entropies)
        percentiles.append({"dump": number, "entropies": _MEASURED, **_numbers(entropies)})
        seen = [a.sampler_entropy_nats for a in answers if a.sampler_entropy_nats is not None]
        if seen:
            row = {"dump": number, "entropies": "seen by the sampler"}
            percentiles.append({**row, **_numbers(np.concatenate(seen))})
        repeats = [_repeats(answer.token_id) for answer in answers]
        positions += _by_position(number, [a.entropy_nats for a in answers], repeats)
    return Study(
        name="distribution",
        rules={
            "entropy": ENTROPY_RULE,
            "percentile": PERCENTILE_RULE,
            "repeated": f"share of tokens that complete {_NGRAM} tokens in a row which the same "
            "answer held before",
        },
        settings={"bin_width_nats": bin_width_nats},
        sources=[dump.provenance() for dump in dumps],
        summary={
            "tokens": [len(entropies) for entropies in pooled],
            "p80_nats": [row["p80_nats"] for row in percentiles if row["entropies"] == _MEASURED],
        },
        tables={
            "percentiles": percentiles,
            "histogram": _histogram(pooled, bin_width_nats),
            "positions": positions,
        },
    )


def _numbers(entropies: np.ndarray) -> dict[str, Any]:
    values = np.percentile(entropies.astype(np.float64), PERCENTILES, method="linear")
    return {
        "tokens": len(entropies),
        "mean_nats": rounded(entropies.mean(dtype=np.float64)),
        **{f"p{p}_nats": rounded(v) for p, v in zip(PERCENTILES, values, strict=True)},
        "max_nats": rounded(entropies.max()),
    }


def _histogram(pooled: Sequence[np.ndarray], width: float) -> list[Row]:
    """The same bins for every dump, so that they can be laid over each other."""
    bins = int(max(entropies.max() for entropies in pooled) / width) + 1
    edges = np.arange(bins + 1) * width
    return [
        {
            "dump": number,
            "from_nats": rounded(edges[index]),
            "to_nats": rounded(edges[index + 1]),
            "tokens": int(count),
            "share": rounded(count / len(entropies)),
        }
        for number, entropies in enumerate(pooled)
        for index, count in enumerate(np.histogram(entropies, edges)[0])
    ]


def _repeats(tokens: np.ndarray) -> np.ndarray:
    """bool [T]: the last `_NGRAM` tokens stood, in this order, earlier in the answer."""
    seen: set[bytes] = set()
    repeated = np.zeros(len(tokens), dtype=np.bool_)
    for end in range(_NGRAM, len(tokens) + 1):
        ngram = tokens[end - _NGRAM : end].tobytes()
        repeated[end - 1] = ngram in seen
        seen.add(ngram)
    return repeated


def _by_position(
    number: int, entropies: Sequence[np.ndarray], repeats: Sequence[np.ndarray]
) -> list[Row]:
    rows: list[Row] = []
    for low, high in zip(_POSITIONS, (*_POSITIONS[1:], None), strict=True):
        values = np.concatenate([one[low:high] for one in entropies]).astype(np.float64)
        if len(values):
            rows.append(
                {
                    "dump": number,
                    "from_position": low,
                    "to_position": low + max(len(one[low:high]) for one in entropies) - 1,
                    "tokens": len(values),
                    "mean_nats": rounded(values.mean()),
                    "median_nats": rounded(np.median(values)),
                    "repeated": rounded(np.concatenate([one[low:high] for one in repeats]).mean()),
                }
            )
    return rows
