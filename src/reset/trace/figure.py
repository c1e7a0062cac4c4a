"""The chart of a trace as a PNG: entropies, means and threshold over the output position.

Draws with matplotlib's Agg canvas, without pyplot: no window, no state shared with a caller's own
figures. matplotlib is imported when a figure is written, not before.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reset.files import written_aside
from reset.trace.record import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 150
_WIDTH_INCHES, _HEIGHT_INCHES = 11.0, 4.2
_MAX_BORDERS = 150

# The colours of page.css, light scheme.
_INK, _SOFT, _LOW, _HIGH = "#1c2430", "#5c6675", "#2f78b7", "#c2500a"
_TAU, _STEP, _MEAN = "#1c2430", "#8a3fa8", "#0f7f6b"


def write_figure(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Write the chart of `trace` as a PNG of 1650 x 630 pixels; an old file is replaced.

    Returns:
        `path`, which appears only when the picture is whole.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the folder of `path` does not exist, or `path` is a folder.
        OSError: the file could not be written; an old file at `path` is as it was.
    """
    figure = _draw(trace)
    with written_aside(path) as partial:
        figure.savefig(partial, format="png", dpi=_DPI)
    return Path(path)


def _draw(trace: Trace) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the PNG of a trace needs matplotlib, which is not installed; "
            "pip install 'reset-decoding[plot]', or write the HTML page, which needs nothing"
        ) from error
    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_entropies(axes, trace)
    _draw_lines(axes, trace)
    borders = [token.position + 0.5 for token in trace.tokens[:-1] if token.ends_step]
    # More of them, a few pixels apart, would be a curtain before the chart.
    if len(borders) <= _MAX_BORDERS:
        for border in borders:
            axes.axvline(border, color=_SOFT, linewidth=0.7, linestyle=(0, (1, 3)))
    axes.set_xlim(-0.5, max(len(trace.tokens), 1) - 0.5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("output position (tokens)", color=_INK)
    axes.set_ylabel("entropy (nats)", color=_INK)
    axes.tick_params(colors=_SOFT)
    axes.spines[["top", "right"]].set_visible(False)
    # A model's name is no formula, whatever signs it holds.
    axes.set_title(_title(trace), loc="left", fontsize=10.5, color=_INK, parse_math=False)
    if trace.tokens:
        figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9.5)
    return figure


def _draw_entropies(axes: Axes, trace: Trace) -> None:
    # In points: a bar of T_high is wider, so that it is told apart without colour as well.
    room = 72 * 0.9 * _WIDTH_INCHES / max(len(trace.tokens), 1)
    kinds: tuple[tuple[bool, str, float, str], ...] = (
        (False, _LOW, 0.5, r"$H_t$ at $T_\mathrm{low}$"),
        (True, _HIGH, 0.75, r"$H_t$ at $T_\mathrm{high}$"),
    )
    if trace.is_fixed:
        kinds = ((False, _LOW, 0.75, "$H_t$"),)
    for at_t_high, color, share, label in kinds:
        chosen = [token for token in trace.tokens if trace.is_at_t_high(token) == at_t_high]
        if chosen:
            positions = [token.position for token in chosen]
            tops = [token.entropy_nats for token in chosen]
            width = min(max(room * share, 0.4), 6.0)
            axes.vlines(positions, 0, tops, colors=color, linewidth=width, label=label)


def _draw_lines(axes: Axes, trace: Trace) -> None:
    positions = [token.position for token in trace.tokens]

    def line(values: Sequence[float], label: str, **look: Any) -> None:
        axes.plot(positions, values, drawstyle="steps-mid", label=label, **look)

    thresholds = [token.threshold_nats for token in trace.tokens]
    if any(tau is not None for tau in thresholds):
        gaps = [math.nan if tau is None else tau for tau in thresholds]
        line(gaps, r"$\tau_t$ threshold", color=_TAU, linewidth=4.0, alpha=0.27)
    if trace.tokens:
        means = [token.mean_entropy_nats for token in trace.tokens]
        line(means, r"$H_\mathrm{bar}$ so far", color=_MEAN, linewidth=1.3, linestyle="--")
        steps = [token.step_entropy_nats for token in trace.tokens]
        line(steps, r"$H_\mathrm{step}$ this step", color=_STEP, linewidth=1.4)


def _title(trace: Trace) -> str:
    policy = trace.policy
    if trace.is_fixed:
        return f"{trace.model}\npolicy fixed, temperature {policy['base_temp']:g}"
    tau_0 = "" if policy["tau_0"] is None else f", tau_0 {policy['tau_0']:g} nats"
    return (
        f"{trace.model}\npolicy {policy['policy']}, estimator {policy['estimator']}, "
        f"T_low {policy['t_low']:g}, T_high {policy['t_high']:g}{tau_0}, window {policy['window']}"
    )
