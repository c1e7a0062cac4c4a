"""Tables and plot of docs/performance.md for linear layers, from results/linear.jsonl."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

Line = dict[str, Any]
SHOWN = (1, 8, 16, 32, 64)  # of the kernels, in the first table
PATHS = {
    "small": "linear_small",
    "medium": "linear_medium",
    "large": "linear_large",
    "unpack": "unpack, then cuBLAS",
}


class Figures:
    """The newest measurement of everything."""

    def __init__(self, lines: list[Line]) -> None:
        self._newest = {(line.get("shape"), line.get("M"), line["impl"]): line for line in lines}
        self.read = self._newest[None, None, "read"]["tb_per_s"]
        self.shapes = list(dict.fromkeys(line["shape"] for line in lines if "shape" in line))
        self.tokens = sorted({M for shape, M, impl in self._newest if impl == "marlin"})

    def line(self, shape: str, M: int, impl: str) -> Line:
        return self._newest[shape, M, impl]

    def has(self, shape: str, M: int) -> bool:
        return (shape, M, "marlin") in self._newest

    def us(self, shape: str, M: int, impl: str) -> float:
        return float(self.line(shape, M, impl)["median_us"])

    def ratio(self, shape: str, M: int) -> float:
        """Marlin's time over ours, both from one run."""
        return self.us(shape, M, "marlin") / self.us(shape, M, "nvfp4r")

    def path(self, M: int) -> str:
        """What served M tokens, as the lines say; those that do not are older than linear_large."""
        older = "small" if M <= 8 else "medium" if M <= 64 else "unpack"
        lines = [self.line(shape, M, "nvfp4r") for shape in self.shapes if self.has(shape, M)]
        return " or ".join(dict.fromkeys(PATHS[line.get("path", older)] for line in lines))

    def ratios(self, M: int) -> list[float]:
        return [self.ratio(shape, M) for shape in self.shapes if self.has(shape, M)]


def linear_table(lines: list[Line]) -> str:
    """Times in us of every shape, ratios to Marlin from the same run, and their means."""
    figures = Figures(lines)
    columns = " / ".join(map(str, SHOWN))
    rows = [
        f"| N x K | limit | nvfp4r, M = {columns} | Marlin | x Marlin | no PDL, M = 1 "
        "| bf16, M = 1 | share of read bandwidth, M = 1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for shape in figures.shapes:
        line = figures.line(shape, 1, "nvfp4r")
        N, K = line["N"], line["K"]
        ours, stock = (
            " / ".join(f"{figures.us(shape, M, impl):.1f}" for M in SHOWN)
            for impl in ("nvfp4r", "marlin")
        )
        ratios = " / ".join(f"{figures.ratio(shape, M):.2f}" for M in SHOWN)
        rows.append(
            f"| {shape} {N} x {K} | {N * K * 9 / 16 / figures.read / 1e6:.1f} | {ours} | {stock} "
            f"| {ratios} | {figures.us(shape, 1, 'nvfp4r_no_pdl'):.1f} "
            f"| {figures.us(shape, 1, 'bf16'):.1f} | {line['of_read']:.0%} |"
        )
    rows += [
        "",
        "| M | path | geometric mean over Marlin | worst shape | shapes |",
        "|---|---|---|---|---|",
    ]
    for M in figures.tokens:
        values = figures.ratios(M)
        mean = _geometric_mean(values)
        rows.append(
            f"| {M} | {figures.path(M)} | {mean:.2f}x | {min(values):.2f}x | {len(values)} |"
        )
    source = figures.line(figures.shapes[0], 1, "nvfp4r")
    rows += [
        "",
        f"{source['date']}, {source['gpu']}, driver {source['driver']}, torch {source['torch']}, "
        f"vLLM {source['vllm']}, read bandwidth {figures.read:.2f} TB/s, commit {source['git']}: "
        f"`{source['command']}`",
    ]
    return "\n".join(rows)


def plot_linear(lines: list[Line], path: Path) -> None:
    """Ratio to Marlin over M: one thin line a shape, a thick one for the geometric mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figures = Figures(lines)
    tokens = [M for M in figures.tokens if len(figures.ratios(M)) == len(figures.shapes)]
    plot, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for shape in figures.shapes:
        axes.plot(tokens, [figures.ratio(shape, M) for M in tokens], color="0.75", linewidth=1)
    means = [_geometric_mean(figures.ratios(M)) for M in tokens]
    axes.plot(tokens, means, color="tab:blue", linewidth=2.5, marker="o", label="geometric mean")
    axes.plot([], [], color="0.75", label="one shape")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, map(str, tokens))
    axes.set_xlabel("M, tokens")
    axes.set_ylabel("times as fast as Marlin")
    axes.set_ylim(bottom=0)
    axes.set_title(f"NVFP4 linear layers, {figures.line(figures.shapes[0], 1, 'nvfp4r')['gpu']}")
    axes.legend(frameon=False)
    plot.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(plot)


def _geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
