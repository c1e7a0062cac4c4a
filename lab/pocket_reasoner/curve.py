"""The learning curve: a line of JSON a measurement while one trains, a figure at the end.

    python -m lab.pocket_reasoner.curve MODEL

draws the figure of a model folder again.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from lab.pocket_reasoner.problems import FAMILIES
from reset.files import written_aside

CURVE_FILE, CURVE_FIGURE = "learning_curve.jsonl", "learning_curve.png"

_INK, _SOFT = "#1c2430", "#5c6675"
_LOOKS = {
    "chain": {"color": "#c2500a", "linestyle": "--", "marker": "s"},
    "search": {"color": "#2f78b7", "linestyle": ":", "marker": "^"},
}


class LearningCurve:
    """Points of a training, kept and appended to a file at once; use it in a `with` block."""

    def __init__(self, path: Path) -> None:
        self.points: list[dict[str, Any]] = []
        self._file = path.open("w", encoding="utf-8")

    def __enter__(self) -> LearningCurve:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def add(self, **point: float) -> None:
        self.points.append(point)
        self._file.write(json.dumps(point) + "\n")
        self._file.flush()


def draw_curve(points: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Loss, and greedy accuracy on held-out problems, over the tokens seen.

    Raises:
        ImportError: matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    losses = [point for point in points if "loss" in point]
    millions = [point["tokens"] / 1e6 for point in losses]
    left.plot(millions, [point["loss"] for point in losses], color=_INK, linewidth=1)
    left.set_yscale("log")
    left.set_ylabel("loss on solutions (nats per token)")
    for family in FAMILIES:
        measured = [point for point in points if family in point]
        right.plot(
            [point["tokens"] / 1e6 for point in measured],
            [100 * point[family] for point in measured],
            label=family,
            **_LOOKS[family],
        )
    right.set_ylim(-3, 103)
    right.set_ylabel("solved, greedy, calibration problems (%)")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.set_xlabel("tokens seen (millions)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=_SOFT, alpha=0.25, linewidth=0.6)
    with written_aside(path) as partial:
        figure.savefig(partial, format="png", dpi=150)


def require_matplotlib() -> None:
    """Raises ImportError, with what to do, if matplotlib is missing; call it before long work."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "the learning curve is drawn with matplotlib, which is missing; pip install matplotlib"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="model folder")
    folder: Path = parser.parse_args().model
    lines = (folder / CURVE_FILE).read_text(encoding="utf-8").splitlines()
    draw_curve([json.loads(line) for line in lines], folder / CURVE_FIGURE)


if __name__ == "__main__":
    main()
