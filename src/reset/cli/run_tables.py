"""Tables and progress of `reset-run` and `reset-calibrate`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from nvfp4r.console import notes
from reset.calibrate import Calibration
from reset.evaluate.compare import Comparison
from reset.evaluate.runner import Progress as OnProgress
from reset.evaluate.soundness import Soundness
from reset.evaluate.stats import Estimate


@contextmanager
def answer_progress(title: str) -> Iterator[OnProgress]:
    """A progress bar over answers on standard error, with the rate and the time left."""
    columns = (
        TextColumn("{task.description:<11}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("answers"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
    )
    began = time.monotonic()
    with Progress(*columns, console=notes()) as progress:
        task = progress.add_task(title, total=None, rate="")

        def advance(done: int, total: int, tokens: int) -> None:
            seconds = time.monotonic() - began
            rate = f"{tokens / seconds:.0f} tokens/s" if tokens and seconds > 0 else ""
            progress.update(task, completed=done, total=total, rate=rate)

        yield advance


def score_table(scores: dict[str, Any], speed: dict[str, Any]) -> Table:
    """One run: the content of scores.json and speed.json."""
    score = scores["score"]
    table = Table("what", "value", show_header=False)
    table.add_row("score, mean over seeds", _percent(score["mean"]))
    table.add_row("standard error over problems", _points(score["standard_error"]))
    if score["low"] is not None:
        table.add_row("95 % interval", f"{_percent(score['low'])} .. {_percent(score['high'])}")
    else:
        table.add_row("95 % interval", "unknown for one problem")
    table.add_row("each seed", ", ".join(_percent(mean) for mean in scores["seed_means"]))
    table.add_row("deviation between seeds", _points(scores["seed_deviation"]))
    table.add_row("truncated", _percent(scores["truncated"]))
    table.add_row("score without truncated", _percent(scores["score_completed"]))
    table.add_row("unparsed", _percent(scores["unparsed"]))
    table.add_row("repetition rate", _percent(scores["repetition_rate"]))
    table.add_row("caught in a loop", _percent(scores["looping"]))
    table.add_row("tokens per answer", f"{scores['tokens_per_answer']:.0f}")
    rate = speed["tokens_per_second"]
    table.add_row("speed", "-" if rate is None else f"{rate:.1f} tokens/s")
    table.add_row("problems x samples", f"{scores['problems']} x {len(scores['seed_means'])}")
    return table


def comparison_table(comparison: Comparison) -> Table:
    """One line a run; differences in points."""
    level = f"{100 * comparison.level:.4g} %"
    table = Table(
        *("run", "score", "95 % interval", "difference", f"{level} interval", "ratio", "verdict"),
        *("truncated", "tokens"),
        title=f"{comparison.task}, {comparison.problems} problems",
    )
    for line in comparison.lines:
        difference = line.difference
        table.add_row(
            line.name,
            _percent(line.score.mean),
            _interval(line.score),
            "" if difference is None else f"{100 * difference.mean:+.1f}",
            "" if difference is None else _interval(difference, signed=True),
            "" if line.ratio is None else f"{line.ratio:.3f}",
            line.verdict,
            _percent(line.truncated),
            f"{line.tokens_per_answer:.0f}",
        )
    return table


def threshold_table(found: Calibration) -> Table:
    """tau_0 and what it rests on."""
    table = Table("tau_0", "95 % interval", "percentile", "problems", "tokens", "truncated")
    ends = found.tau_0_interval
    interval = "unknown for one problem" if len(found.problems) == 1 else "unknown"
    if ends is not None:
        interval = f"{ends['low']:.4f} .. {ends['high']:.4f}"
    table.add_row(
        f"{found.config['tau_0']:.4f} nats",
        interval,
        f"{found.percentile:g}" if found.problems else "given",
        str(len(found.problems)),
        str(sum(found.tokens)),
        str(found.truncated),
    )
    return table


def search_table(arms: Sequence[dict[str, Any]]) -> Table:
    """One line an arm, as `arm_rows` makes them; differences in points."""
    columns = ("arm", "score", "95 % interval", "tokens", "truncated", "in a loop")
    table = Table(*columns, "from the best fixed", "interval, all arms together")
    for arm in arms:
        if arm["refused"]:
            table.add_row(arm["name"], "no score", *[""] * 6)
            continue
        score, difference = arm["score"], arm["difference"]
        table.add_row(
            arm["name"],
            _percent(score["mean"]),
            "unknown" if score["low"] is None else _ends(score),
            f"{arm['tokens_per_answer']:.0f}",
            _percent(arm["truncated"]),
            _percent(arm["looping"]),
            "" if difference is None else f"{100 * difference['mean']:+.1f}",
            "" if difference is None else _ends(difference, signed=True),
        )
    return table


def soundness_table(arms: dict[str, Soundness]) -> Table:
    """One line an arm of `reset-run check`; repetition and odd words of the last third."""
    columns = ("arm", "tokens", "truncated", "blank or stuck", "in a loop", "repetition")
    table = Table(*columns, "odd words", "verdict")
    for name, found in arms.items():
        shares = (found.truncated, found.degenerate, found.looping, found.repetition_rate)
        table.add_row(
            name,
            f"{found.tokens_per_answer:.0f}",
            *map(_percent, (*shares, found.odd_words)),
            "; ".join(found.faults) or "sound",
        )
    return table


def _ends(value: dict[str, float], *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return f"{100 * value['low']:{sign}.1f} .. {100 * value['high']:{sign}.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _points(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:.1f} points"


def _interval(value: Estimate, *, signed: bool = False) -> str:
    if math.isnan(value.low):
        return "unknown"
    return _ends({"low": value.low, "high": value.high}, signed=signed)
