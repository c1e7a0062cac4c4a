"""The figure of the study: accuracy of every arm, a panel a form.

    python -m lab.pocket_reasoner.drawing RESULTS.json accuracy.png

Draws what results.json holds, no more.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reset.files import written_aside

_INK, _SOFT = "#1c2430", "#5c6675"
_LOOKS = {"higher": ("#2f78b7", "^"), "lower": ("#c2500a", "v")}


def draw_accuracy(results: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: score over both families with its interval; marks tell what is shown.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models = results["models"]
    arms = list(next(iter(models.values()))["arms"])
    figure = Figure(figsize=(3.2 * len(models) + 1.2, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(models), sharey=True, sharex=True, squeeze=False)[0]
    for axes, (name, facts) in zip(panels, models.items(), strict=True):
        scores = results["comparisons"]["scores"][name]
        against = results["comparisons"]["against_best_fixed"][name]
        for row, arm in enumerate(arms):
            if arm not in scores:
                continue
            one = scores[arm]
            verdict = against.get(arm, {}).get("verdict", "")
            color, marker = _LOOKS.get(verdict, (_INK, "o"))
            if one["low"] is not None:
                axes.hlines(row, 100 * one["low"], 100 * one["high"], colors=color, linewidth=1.8)
            axes.plot([100 * one["mean"]], [row], marker=marker, color=color, linestyle="none")
        best = facts["calibration"]["best_fixed"]
        if best in scores:
            axes.axvline(100 * scores[best]["mean"], color=_SOFT, linewidth=0.8, linestyle=":")
        axes.set_title(f"{name}; dotted: {best}", loc="left", fontsize=10, parse_math=False)
        axes.set_xlabel("solved, both families (%)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color=_SOFT, alpha=0.25, linewidth=0.6)
    panels[0].set_yticks(range(len(arms)), arms)
    panels[0].set_ylim(len(arms) - 0.5, -0.5)
    figure.suptitle(
        "Triangles: shown to differ from the best fixed temperature; bars: 95 % over problems",
        fontsize=10,
    )
    with written_aside(path) as partial:
        figure.savefig(partial, format="png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="results.json of a study")
    parser.add_argument("figure", type=Path, help="PNG to write")
    arguments = parser.parse_args()
    draw_accuracy(json.loads(arguments.results.read_text(encoding="utf-8")), arguments.figure)


if __name__ == "__main__":
    main()
