"""Table of docs/performance.md for activations that are rounded or rotated, from prologue.jsonl."""

from __future__ import annotations

import statistics
from typing import Any

Line = dict[str, Any]
KINDS = {"quantise": "rounded", "rotate": "rotated", "rotate, quantise": "rotated and rounded"}


def prologue_table(lines: list[Line]) -> str:
    """Microseconds over the same layer with activations as they are: median and range of shapes."""
    times = {
        (line["shape"], line["M"], line["kind"], line["impl"]): float(line["median_us"])
        for line in lines
        if "shape" in line and not _also_apart(line)
    }
    tokens = sorted({M for _, M, _, _ in times})
    shapes = list(dict.fromkeys(shape for shape, _, _, _ in times))
    rows = [
        "| M | activations | that kernel alone | more, in a kernel before | more, on the way |",
        "|---|---|---|---|---|",
    ]
    for M in tokens:
        for kind, told in KINDS.items():
            cells = []
            for way in ("alone", "apart", "fused"):
                values = [
                    times[shape, M, kind, way]
                    - (0 if way == "alone" else times[shape, M, "none", "none"])
                    for shape in shapes
                    if (shape, M, kind, way) in times
                ]
                cells.append(_range(values))
            rows.append(f"| {M} | {told} | {' | '.join(cells)} |")
    source = next(line for line in reversed(lines) if "shape" in line)
    return "\n".join(
        [
            *rows,
            "",
            f"{source['date']}, {source['gpu']}, driver {source['driver']}, torch "
            f"{source['torch']}, commit {source['git']}: `{source['command']}`",
        ]
    )


def _also_apart(line: Line) -> bool:
    """What the op does where its plan has a kernel before as well: that is measured by itself."""
    return line["impl"] == "fused" and line["plan"].endswith(", apart")


def _range(values: list[float]) -> str:
    if not values:
        return "-"
    shapes = "" if len(values) == 12 else f", {len(values)} shapes"
    return f"{statistics.median(values):.1f} us ({min(values):.1f} to {max(values):.1f}{shapes})"
