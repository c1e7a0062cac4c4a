"""The figure of a comparison: scores with their intervals, and differences from the baseline.

Draws with matplotlib, without pyplot; matplotlib is imported when a figure is written.
"""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reset.evaluate.compare import HIGHER, LOWER, Comparison
from reset.evaluate.stats import Estimate
from reset.files import written_aside

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _SOFT, _UP, _DOWN = "#1c2430", "#5c6675", "#2f78b7", "#c2500a"
_MARKERS = {HIGHER: (_UP, "^"), LOWER: (_DOWN, "v")}  # told apart without colour as well
_DPI = 150


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes comparison.json, .png and .svg into `folder`, which is made if it is not there.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError, OSError: the folder cannot be written to.
    """
    require_matplotlib()
    figure = _draw(comparison)
    folder.mkdir(exist_ok=True)
    paths = [folder / f"comparison.{ending}" for ending in ("json", "png", "svg")]
    with written_aside(paths[0]) as partial:
        text = json.dumps(comparison.to_dict(), indent=2, allow_nan=False)
        partial.write_text(text + "\n", encoding="utf-8")
    for path in paths[1:]:
        with written_aside(path) as partial:
            figure.savefig(partial, format=path.suffix[1:], dpi=_DPI)
    return paths


def require_matplotlib() -> None:
    """Raises ImportError, with what to do, if matplotlib is missing; call it before long work."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "the figure of a comparison needs matplotlib, which is not installed; pip install "
            "'reset-decoding[plot]'"
        )


def _draw(comparison: Comparison) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = comparison.lines
    figure = Figure(figsize=(9.0, 1.6 + 0.42 * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for row, line in enumerate(lines):
        _point(left, row, line.score, _INK, "o", 100)
        if line.difference is not None:
            color, marker = _MARKERS.get(line.verdict, (_SOFT, "o"))
            _point(right, row, line.difference, color, marker, 100)
    left.set_yticks(range(len(lines)), [line.name for line in lines], parse_math=False)
    left.set_ylim(len(lines) - 0.5, -0.5)  # the baseline on top
    left.set_xlabel("score (%), 95 % interval", color=_INK)
    right.axvline(0, color=_INK, linewidth=0.8)
    right.set_xlabel(
        f"difference from {lines[0].name} (points), {100 * comparison.level:.4g} % interval",
        color=_INK,
        parse_math=False,
    )
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color=_SOFT, alpha=0.25, linewidth=0.6)
        axes.tick_params(colors=_SOFT)
    figure.suptitle(f"{comparison.task}, {comparison.problems} problems", fontsize=10.5)
    return figure


def _point(axes: Axes, row: int, value: Estimate, color: str, marker: str, scale: float) -> None:
    if not math.isnan(value.low):
        axes.hlines(row, scale * value.low, scale * value.high, colors=color, linewidth=1.8)
    axes.plot([scale * value.mean], [row], marker=marker, color=color, linestyle="none")
