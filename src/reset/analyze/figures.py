"""Draws studies as PNG and SVG: axes with units, nothing told apart by colour alone.

Draws with matplotlib's Agg and SVG canvases, without pyplot; matplotlib is imported when a figure
is written, not before. Knows the tables of each study, not how they came about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from reset.analyze.study import Row, Study, output_files
from reset.files import written_aside

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 150
_SIZE_INCHES = (8.0, 4.8)
_INK, _SOFT = "#1c2430", "#5c6675"
# Line, marker and shade differ together, so that a grey print tells them apart.
_LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "#1c2430", "linestyle": "-", "marker": "o"},
    {"color": "#c2500a", "linestyle": "--", "marker": "s"},
    {"color": "#2f78b7", "linestyle": ":", "marker": "^"},
    {"color": "#0f7f6b", "linestyle": "-.", "marker": "D"},
    {"color": "#8a4fa3", "linestyle": (0, (4, 1, 1, 1, 1, 1)), "marker": "v"},
    {"color": "#7a6a00", "linestyle": (0, (1, 3)), "marker": "P"},
)


def write_figures(study: Study, prefix: Path) -> list[Path]:
    """Write PREFIX.png and PREFIX.svg of a study.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the folder of `prefix` does not exist, or there is no figure of such a study.
        OSError: a file could not be written.
    """
    check_matplotlib()
    from matplotlib import rc_context

    if study.name not in _DRAW:
        raise ValueError(f"there is no figure of {study.name!r}, only of {', '.join(_DRAW)}")
    files = output_files(prefix)
    figure = _figure()
    _DRAW[study.name](study, figure)
    # Text stays text in the SVG, and two drawings of the same numbers are the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "reset"}):
        with written_aside(files["png"]) as partial:
            figure.savefig(partial, format="png", dpi=_DPI)
        with written_aside(files["svg"]) as partial:
            figure.savefig(partial, format="svg", metadata={"Date": None})
    return [files["png"], files["svg"]]


def check_matplotlib() -> None:
    """Raise an ImportError that says what to install if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "figures need matplotlib, which is not installed; pip install 'reset-decoding[plot]', "
            "or leave --output out and use --json"
        ) from error


def _figure() -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _axes(figure: Figure, title: str, x: str, y: str) -> Axes:
    axes = figure.add_subplot()
    axes.set_xlabel(x, color=_INK)
    axes.set_ylabel(y, color=_INK)
    axes.tick_params(colors=_SOFT)
    axes.spines[["top", "right"]].set_visible(False)
    # A model's name is no formula, whatever signs it holds.
    axes.set_title(title, loc="left", fontsize=10.5, color=_INK, parse_math=False)
    return axes


def _source(study: Study, number: int = 0) -> str:
    source = study.sources[number]
    form = source["quantisation"]["format"]
    return f"{source['model']} ({'' if form == 'none' else form + ', '}{source['dtype']})"


def _legend(figure: Figure) -> None:
    look: dict[str, Any] = {"frameon": False, "fontsize": 9.5, "handlelength": 3.5}
    figure.legend(loc="outside lower center", ncols=2, **look)


def _distribution(study: Study, figure: Figure) -> None:
    axes = _axes(
        figure,
        "Entropy of raw logits, all output tokens",
        "token entropy (nats)",
        f"share of tokens per {study.settings['bin_width_nats']:g} nats",
    )
    for number in range(len(study.sources)):
        look = _LOOKS[number % len(_LOOKS)]
        bins = [row for row in study.tables["histogram"] if row["dump"] == number]
        edges = [bins[0]["from_nats"], *(row["to_nats"] for row in bins)]
        p80 = study.summary["p80_nats"][number]
        shares = [row["share"] for row in bins]
        plain = {key: look[key] for key in ("color", "linestyle")}
        name = _source(study, number)
        axes.stairs(shares, edges, label=name, linewidth=1.5, baseline=None, **plain)
        mark = {"marker": look["marker"], "color": look["color"], "linestyle": "none"}
        label = f"its 80th percentile, {p80:.3f} nats"
        axes.plot([p80], [_height(bins, p80)], label=label, markersize=7, **mark)
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    _legend(figure)


def _height(bins: Sequence[Row], value: float) -> float:
    return next((b["share"] for b in bins if b["from_nats"] <= value < b["to_nats"]), 0.0)


def _steps(study: Study, figure: Figure) -> None:
    from matplotlib.colors import LogNorm

    title = (
        f"{_source(study)}: {study.summary['tokens']:,} tokens, {study.summary['steps']:,} steps"
    )
    axes = _axes(figure, title, "mean entropy of the step (nats)", "token entropy (nats)")
    cells = study.tables["histogram"]
    xs = _edges(cells, "step")
    ys = _edges(cells, "token")
    counts = [[0.0] * (len(xs) - 1) for _ in range(len(ys) - 1)]
    for cell in cells:
        counts[ys.index(cell["token_from_nats"])][xs.index(cell["step_from_nats"])] = cell["tokens"]
    most = max(cell["tokens"] for cell in cells)
    shown = [[value or float("nan") for value in row] for row in counts]
    mesh = axes.pcolormesh(xs, ys, shown, cmap="Greys", norm=LogNorm(0.5, max(most, 1)))
    figure.colorbar(mesh, ax=axes, label="tokens")
    groups = study.tables["groups"]
    means = [row["step_mean_nats"] for row in groups]
    for look, percentile in zip(_LOOKS[1:4], (50, 80, 99), strict=True):
        heights = [row[f"p{percentile}_nats"] for row in groups]
        axes.plot(means, heights, label=f"{percentile}th percentile of the tokens", **look)
    top = max(xs[-1], 1e-6)
    axes.plot([0, top], [0, top], color=_INK, linewidth=1, label="token = its step")
    if study.settings["tau_0_nats"] is not None:
        tau = study.settings["tau_0_nats"]
        look = {"color": _SOFT, "linewidth": 2, "linestyle": (0, (6, 2))}
        axes.axhline(tau, label=f"tau_0 {tau:g} nats", **look)
    axes.set_xlim(0, 1.02 * top)
    axes.set_ylim(0, 1.04 * ys[-1])
    _legend(figure)


def _edges(cells: Iterable[Row], name: str) -> list[float]:
    return sorted({cell[f"{name}_{end}_nats"] for cell in cells for end in ("from", "to")})


def _shift(study: Study, figure: Figure) -> None:
    title = f"{_source(study, 1)}\nminus {_source(study, 0)}; bars: 95 % over answers"
    x = "token entropy, mean of both models (nats)"
    axes = _axes(figure, title, x, "change of entropy (nats)")
    axes.axhline(0, color=_SOFT, linewidth=0.8)
    rows = [row for row in study.tables["curve"] if row["grouped_by"] == "mean"]
    for look, steps in zip(_LOOKS, ("confident", "uncertain"), strict=False):
        mine = [row for row in rows if row["steps"] == steps]
        if not mine:
            continue
        shifts = [row["shift_nats"] for row in mine]
        axes.plot([_middle(row) for row in mine], shifts, label=f"{steps} steps", **look)
        for row in mine:
            if row["shift_low_nats"] is not None:
                low, high = row["shift_low_nats"], row["shift_high_nats"]
                # A bootstrap interval need not be symmetric, nor hold the point itself.
                bar = {"yerr": (high - low) / 2, "fmt": "none", "capsize": 3}
                axes.errorbar([_middle(row)], [(low + high) / 2], ecolor=look["color"], **bar)
    axes.set_xlim(left=0)
    _legend(figure)


def _middle(row: Row) -> float:
    return float(row["reference_nats"] + row["quantised_nats"]) / 2


def _estimators(study: Study, figure: Figure) -> None:
    window = study.settings["window"]
    axes = _axes(
        figure,
        f"{_source(study)}: estimates of the step's mean entropy, w = {window}",
        "position in the step (tokens)",
        "mean absolute error (nats)",
    )
    rows = study.tables["positions"]
    starts = sorted({row["from_position"] for row in rows})
    for number, name in enumerate(("hybrid", "window", "causal", "ema")):
        look = _LOOKS[number]
        mine = [row for row in rows if row["estimator"] == name]
        # Side by side, as estimators that agree would hide each other.
        aside = 0.08 * (number - 1.5)
        places = [starts.index(row["from_position"]) + aside for row in mine]
        errors = [row["mean_abs_error_nats"] for row in mine]
        axes.plot(places, errors, label=name, markerfacecolor="none", **look)
    axes.set_xticks(range(len(starts)), [_span(rows, start) for start in starts])
    axes.set_ylim(bottom=0)
    _legend(figure)


def _span(rows: Sequence[Row], start: int) -> str:
    end = next(row["to_position"] for row in rows if row["from_position"] == start)
    return f"{start}+" if end is None else str(start) if end == start else f"{start}-{end}"


def _weights(study: Study, figure: Figure) -> None:
    title = f"{study.sources[0]['model']}: weights in NVFP4 against the source; bars: best to worst"
    axes = _axes(figure, title, "kind of layer", "relative error of a layer (%)")
    rows = study.tables["layers"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    width = 0.7 / len(methods)
    for number, method in enumerate(methods):
        look = _LOOKS[number % len(_LOOKS)]
        aside = width * (number - (len(methods) - 1) / 2)
        places, middles, below, above = [], [], [], []
        for place, kind in enumerate(kinds):
            errors = [
                100 * row["relative_error"]
                for row in rows
                if (row["method"], row["kind"]) == (method, kind)
                and row["relative_error"] is not None
            ]
            if errors:
                middle = median(errors)
                places.append(place + aside)
                middles.append(middle)
                below.append(middle - min(errors))
                above.append(max(errors) - middle)
        plain = {"color": look["color"], "marker": look["marker"], "linestyle": "none"}
        axes.errorbar(
            places, middles, yerr=[below, above], label=f"{method}, median", capsize=2, **plain
        )
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_ylim(bottom=0)
    _legend(figure)


_DRAW: Mapping[str, Callable[[Study, Figure], None]] = {
    "distribution": _distribution,
    "steps": _steps,
    "shift": _shift,
    "estimators": _estimators,
    "weights": _weights,
}
