"""What quantisation does to a token's entropy, by how sure the model was of token and step.

Two dumps of one sequence are compared token by token. Tokens picked for a low entropy of the
reference seem to rise, and those picked for a high one to fall, even if the second model differs by
noise alone (regression to the mean); so every figure is given twice, grouped by the reference's
entropy and by the mean of both, which has no such bias if the noise of both is alike.

Knows records and numbers; draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reset.analyze.dump import ENTROPY_RULE, AnswerRecord, Dump, require_complete
from reset.analyze.replay import PERCENTILE_RULE, uncertain_steps
from reset.analyze.study import Row, Study, rounded

_CURVE = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)
_RESAMPLES = 2000

# Columns of the numbers of a token, which are summed by group and answer.
_COLUMNS = ("tokens", "reference", "quantised", "inflated", "collapsed", "argmax", "logprob")


def shift(
    reference: Dump,
    quantised: Dump,
    *,
    low_percentile: float = 50.0,
    high_percentile: float = 95.0,
    margin_nats: float = 0.1,
    seed: int = 0,
) -> Study:
    """Compare two complete dumps of the same token sequences.

    Args:
        reference: of the model as it was.
        quantised: of the other model over the same sequences (`reset-analyze dump --forced`).
        low_percentile: tokens below this percentile of the grouping entropy are "low".
        high_percentile: tokens at or above this one are "very high".
        margin_nats: a token is inflated or collapsed if its entropy moved by more than this.
        seed: of the bootstrap over answers.

    Raises:
        ValueError: a dump is not complete, sequences differ (answer and position are named), or a
            setting is out of range.
    """
    if not 0 < low_percentile < high_percentile < 100:
        raise ValueError(
            f"low and high percentile are {low_percentile} and {high_percentile}; need "
            "0 < low < high < 100"
        )
    if not margin_nats >= 0:
        raise ValueError(f"the margin is {margin_nats} nats; it must be at least 0")
    pairs = _pairs(reference, quantised)
    columns = [_columns(old, new, margin_nats) for old, new in pairs]
    uncertain = [uncertain_steps(old) for old, _ in pairs]
    groups: list[Row] = []
    curve: list[Row] = []
    for grouped_by in ("reference", "mean"):
        keys = [_key(old, new, grouped_by) for old, new in pairs]
        pooled = np.concatenate(keys)
        cuts = np.percentile(pooled, (low_percentile, high_percentile), method="linear")
        named = _Groups(("low", "middle", "very high"), cuts)
        groups += _rows(grouped_by, named, keys, uncertain, columns, seed)
        edges = np.unique(np.percentile(pooled, _CURVE[1:-1], method="linear"))
        fine = _Groups([str(number) for number in range(len(edges) + 1)], edges)
        curve += _rows(grouped_by, fine, keys, uncertain, columns, seed)
    return Study(
        name="shift",
        rules={
            "entropy": ENTROPY_RULE,
            "shift": "entropy under the quantised model minus that under the reference, same "
            "token, same text before it; nats",
            "grouped by": "entropy under the reference (biased by regression to the mean), or the "
            "mean of both (not biased if both are equally noisy)",
            "uncertain step": "mean entropy of the step above that of its whole answer, reference",
            "interval": f"95 %, percentile bootstrap over answers, {_RESAMPLES} resamples",
            "percentile": PERCENTILE_RULE,
        },
        settings={
            "low_percentile": low_percentile,
            "high_percentile": high_percentile,
            "margin_nats": margin_nats,
            "seed": seed,
        },
        sources=[reference.provenance(), quantised.provenance()],
        summary=_summary(columns),
        tables={"groups": groups, "curve": curve},
    )


class _Groups:
    """Names of groups and the entropies that divide them: group i ends below `cuts[i]`."""

    def __init__(self, names: Sequence[str], cuts: np.ndarray) -> None:
        self.names, self.cuts = names, cuts

    def of(self, entropy: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.cuts, entropy, side="right")


def _pairs(reference: Dump, quantised: Dump) -> list[tuple[AnswerRecord, AnswerRecord]]:
    for dump in (reference, quantised):
        require_complete(dump)
    if reference.total != quantised.total:
        raise ValueError(
            f"{reference.folder} holds {reference.total} answers, {quantised.folder} "
            f"{quantised.total}; make the second with --forced {reference.folder}"
        )
    pairs = list(zip(reference.answers(), quantised.answers(), strict=True))
    for index, (old, new) in enumerate(pairs):
        same = len(old) == len(new) and np.array_equal(old.prompt_ids, new.prompt_ids)
        if not same or not np.array_equal(old.token_id, new.token_id):
            raise ValueError(
                f"answer {index}: {reference.folder} and {quantised.folder} hold different tokens"
                f"{_difference(old, new)}; make the second with --forced {reference.folder}"
            )
    return pairs


def _difference(old: AnswerRecord, new: AnswerRecord) -> str:
    if len(old) != len(new):
        return f" ({len(old)} and {len(new)})"
    differ = np.flatnonzero(old.token_id != new.token_id)
    return f" from position {differ[0]} on" if differ.size else " in the prompt"


def _columns(old: AnswerRecord, new: AnswerRecord, margin: float) -> np.ndarray:
    """[T, len(_COLUMNS)] float64."""
    before, after = old.entropy_nats.astype(np.float64), new.entropy_nats.astype(np.float64)
    return np.stack(
        [
            np.ones(len(old)),
            before,
            after,
            after - before > margin,
            after - before < -margin,
            (old.rank == 0) & (new.rank != 0),
            new.logprob_nats.astype(np.float64) - old.logprob_nats,
        ],
        axis=1,
    )


def _key(old: AnswerRecord, new: AnswerRecord, grouped_by: str) -> np.ndarray:
    if grouped_by == "reference":
        return old.entropy_nats.astype(np.float64)
    return (old.entropy_nats.astype(np.float64) + new.entropy_nats) / 2


def _rows(
    grouped_by: str,
    groups: _Groups,
    keys: Sequence[np.ndarray],
    uncertain: Sequence[np.ndarray],
    columns: Sequence[np.ndarray],
    seed: int,
) -> list[Row]:
    cells = (len(groups.names), 2)
    sums = np.zeros((len(keys), *cells, len(_COLUMNS)))  # by answer, group, uncertainty of the step
    for answer, key in enumerate(keys):
        place = (groups.of(key), uncertain[answer].astype(np.int64))
        np.add.at(sums[answer], place, columns[answer])
    rows: list[Row] = []
    for number, name in enumerate(groups.names):
        for steps, mine in (
            ("all", sums[:, number].sum(axis=1)),
            ("confident", sums[:, number, 0]),
            ("uncertain", sums[:, number, 1]),
        ):
            if mine[:, 0].any():
                low = groups.cuts[number - 1] if number else 0.0
                high = groups.cuts[number] if number < len(groups.cuts) else None
                row: dict[str, Any] = {
                    "grouped_by": grouped_by,
                    "group": name,
                    "from_nats": rounded(low),
                    "to_nats": None if high is None else rounded(high),
                    "steps": steps,
                }
                rows.append({**row, **_figures(mine, seed)})
    return rows


def _figures(sums: np.ndarray, seed: int) -> dict[str, Any]:
    """Figures of one cell from its sums by answer, [answers, columns]."""
    total = dict(zip(_COLUMNS, sums.sum(axis=0).tolist(), strict=True))
    count = total["tokens"]
    low, high = _interval(sums, seed)
    return {
        "tokens": int(count),
        "answers": int((sums[:, 0] > 0).sum()),
        "reference_nats": rounded(total["reference"] / count),
        "quantised_nats": rounded(total["quantised"] / count),
        "shift_nats": rounded((total["quantised"] - total["reference"]) / count),
        "shift_low_nats": low,
        "shift_high_nats": high,
        "inflated": rounded(total["inflated"] / count),
        "collapsed": rounded(total["collapsed"] / count),
        "likeliest_lost": rounded(total["argmax"] / count),
        "logprob_change_nats": rounded(total["logprob"] / count),
    }


def _interval(sums: np.ndarray, seed: int) -> tuple[float | None, float | None]:
    """Of the mean shift; None where fewer than two answers have such tokens."""
    mine = sums[sums[:, 0] > 0]
    if len(mine) < 2:
        return None, None
    draws = np.random.default_rng(seed).integers(len(mine), size=(_RESAMPLES, len(mine)))
    shifts = (mine[:, 2] - mine[:, 1])[draws].sum(axis=1) / mine[:, 0][draws].sum(axis=1)
    low, high = np.percentile(shifts, (2.5, 97.5), method="linear")
    return rounded(low), rounded(high)


def _summary(columns: Sequence[np.ndarray]) -> dict[str, Any]:
    pooled = np.concatenate(columns)
    before, after = pooled[:, 1], pooled[:, 2]
    return {
        "tokens": len(pooled),
        "answers": len(columns),
        "reference_mean_nats": rounded(before.mean()),
        "quantised_mean_nats": rounded(after.mean()),
        "shift_mean_nats": rounded((after - before).mean()),
        "shift_mean_abs_nats": rounded(np.abs(after - before).mean()),
        "likeliest_lost": rounded(pooled[:, 5].mean()),
        "logprob_change_nats": rounded(pooled[:, 6].mean()),
    }
