"""The tables of the study as Markdown, and their place in docs/accuracy.md.

    python -m lab.pocket_reasoner.tables RESULTS.json docs/accuracy.md

puts the tables of a full study between the two marks of the page; `--study "top-p 1"` between those
of another study, whose marks have that name in them. Every number comes from results.json. Knows no
statistics.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reset.files import written_aside

MAIN = "the study"
"""Name, in the marks of the page, of the study with the default settings."""

_NAMES = {"bf16": "BF16", "w4a16": "NVFP4, W4A16", "w4a4": "NVFP4, W4A4"}


def markdown(results: Mapping[str, Any]) -> str:
    """The tables of one study."""
    return "\n".join(_lines(results)) + "\n"


def marks(study: str = MAIN) -> tuple[str, str]:
    """The lines of a page between which the tables of a study stand."""
    return (
        f"<!-- tables of {study}: begin (lab/pocket_reasoner/tables.py writes what follows) -->",
        f"<!-- tables of {study}: end -->",
    )


def fill(page: str, tables: str, study: str = MAIN) -> str:
    """`page` with `tables` between the marks of `study`.

    Raises:
        ValueError: the page does not have each mark once, in order.
    """
    first, last = marks(study)
    head, begin, rest = page.partition(first)
    _, end, tail = rest.partition(last)
    if not begin or not end or first in rest or last in tail:
        raise ValueError(f"the page needs {first!r} and {last!r}, once each, in this order")
    return f"{head}{first}\n\n{tables.strip()}\n\n{last}{tail}"


def _lines(results: Mapping[str, Any]) -> Iterator[str]:
    scale, models = results["scale"], results["models"]
    compared = results["comparisons"]
    yield (
        f"{results['date']}, {results['device_name']}, torch {results['torch']}, computed in "
        f"{results['dtype']}: {scale['problems']} problems a family, {scale['seeds']} seeds, at "
        f"most {scale['max_tokens']} tokens an answer, top-p {scale['top_p']}."
    )
    yield f"\n    {results['command']}\n"
    for model, facts in models.items():
        chosen = facts["calibration"]
        yield f"### {_NAMES.get(model, model)}\n"
        yield (
            f"Chosen on {scale['calibration_problems']} calibration problems a family: tau_0 "
            f"{chosen['tau_0_nats']:.4g} nats, T_low {chosen['t_low']}, T_high "
            f"{chosen['t_high']}; best fixed temperature: {chosen['best_fixed']}.\n"
        )
        yield from _table(
            (
                *("policy", "chain", "search", "both", f"against {chosen['best_fixed']}"),
                *("verdict", "tokens", "cut off", "repetition"),
            ),
            [
                _arm_row(arm, one, compared["scores"][model], compared["against_best_fixed"][model])
                for arm, one in facts["arms"].items()
            ],
        )
    for model, differences in compared["cost_of_quantisation"].items():
        yield f"### {_NAMES.get(model, model)} minus BF16, same policy\n"
        rows = [(arm, _difference(one), one["verdict"]) for arm, one in differences.items()]
        yield from _table(("policy", "points", "verdict"), rows)
    yield from _entropy_lines(results["diagnostics"])


def _arm_row(
    arm: str, facts: Mapping[str, Any], scores: Mapping[str, Any], against: Mapping[str, Any]
) -> tuple[str, ...]:
    families = facts["families"]
    shares = [_family_score(families[name]) for name in ("chain", "search")]
    if arm not in scores:
        return (arm, *shares, "no score", "", "", "", "", "")
    difference = against.get(arm)
    return (
        arm,
        *shares,
        _estimate(scores[arm]),
        _difference(difference) if difference else "baseline",
        difference["verdict"] if difference else "",
        f"{_mean(families, 'tokens_per_answer'):.0f}",
        f"{100 * _mean(families, 'truncated'):.1f} %",
        f"{100 * _mean(families, 'repetition_rate'):.1f} %",
    )


def _entropy_lines(diagnostics: Mapping[str, Any]) -> Iterator[str]:
    yield "### Entropy\n"
    yield (
        f"The same {diagnostics['answers']} answers of the BF16 model (T = 0.6), token by token, "
        "under its NVFP4 forms. Groups by the mean entropy of both models, which has no bias of "
        "selection if both are equally noisy; 95 % intervals over answers.\n"
    )
    rows = [
        (
            _NAMES.get(model, model),
            row["steps"],
            row["group"],
            f"{row['tokens']}",
            f"{row['shift_nats']:+.4f}",
            _between(row["shift_low_nats"], row["shift_high_nats"], 4),
            f"{100 * row['likeliest_lost']:.2f} %",
        )
        for model, groups in diagnostics["shift"].items()
        for row in groups
    ]
    yield from _table(
        ("model", "steps", "tokens are", "tokens", "shift (nats)", "interval", "likeliest lost"),
        rows,
    )
    step_rows = [
        (
            _NAMES.get(model, model),
            str(facts["tokens"]),
            str(facts["steps"]),
            f"{facts['tokens_per_step_p50']:g}",
            "undefined" if facts["correlation"] is None else f"{facts['correlation']:.3f}",
        )
        for model, facts in diagnostics["steps"].items()
    ]
    yield from _table(
        ("model", "tokens", "steps", "tokens a step (median)", "correlation within steps"),
        step_rows,
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _family_score(report: Mapping[str, Any]) -> str:
    return _estimate(report["score"]) if "score" in report else "no score"


def _estimate(one: Mapping[str, Any]) -> str:
    return f"{100 * one['mean']:.1f} ({_between(one['low'], one['high'], 1, 100)})"


def _difference(one: Mapping[str, Any]) -> str:
    return f"{100 * one['mean']:+.1f} ({_between(one['low'], one['high'], 1, 100, '+')})"


def _between(
    low: float | None, high: float | None, digits: int, scale: int = 1, sign: str = ""
) -> str:
    if low is None or high is None:
        return "unknown"
    return f"{scale * low:{sign}.{digits}f} .. {scale * high:{sign}.{digits}f}"


def _mean(families: Mapping[str, Mapping[str, Any]], name: str) -> float:
    return sum(report[name] for report in families.values()) / len(families)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="results.json of a full study")
    parser.add_argument("page", type=Path, help="docs/accuracy.md")
    parser.add_argument("--study", default=MAIN, help="name in the marks of the page")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text(encoding="utf-8"))
    if results["quick"]:
        parser.error(f"{arguments.results}: is of a quick study, which is too small for the page")
    page = arguments.page.read_text(encoding="utf-8")
    try:
        filled = fill(page, markdown(results), arguments.study)
    except ValueError as error:
        parser.error(f"{arguments.page}: {error}")
    with written_aside(arguments.page) as partial:
        partial.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
