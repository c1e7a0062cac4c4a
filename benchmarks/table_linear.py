"""The table of docs/performance.md for linear layers, from benchmarks/results/linear.jsonl."""

from __future__ import annotations

import math
from typing import Any

Line = dict[str, Any]
TOKENS = (1, 2, 4, 8, 16)


def linear_table(lines: list[Line]) -> str:
    """Times in us of every shape at M = 1, 8 and 16, and ratios to Marlin from the same run."""
    newest = {(line.get("shape"), line.get("M"), line["impl"]): line for line in lines}
    read = newest[None, None, "read"]["tb_per_s"]
    shapes = list(dict.fromkeys(line["shape"] for line in lines if "shape" in line))

    def us(shape: str, M: int, impl: str) -> float:
        return float(newest[shape, M, impl]["median_us"])

    def ratio(shape: str, M: int) -> float:
        return us(shape, M, "marlin") / us(shape, M, "nvfp4r")

    rows = [
        "| N x K | limit | nvfp4r, M = 1 / 8 / 16 | without PDL, M = 1 | Marlin, M = 1 / 8 / 16 "
        "| bf16, M = 1 | x Marlin, M = 1 / 8 / 16 | share of read bandwidth, M = 1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for shape in shapes:
        line = newest[shape, 1, "nvfp4r"]
        N, K = line["N"], line["K"]
        ours, stock = (
            " / ".join(f"{us(shape, M, impl):.1f}" for M in (1, 8, 16))
            for impl in ("nvfp4r", "marlin")
        )
        ratios = " / ".join(f"{ratio(shape, M):.2f}" for M in (1, 8, 16))
        rows.append(
            f"| {shape} {N} x {K} | {N * K * 9 / 16 / read / 1e6:.1f} | {ours} "
            f"| {us(shape, 1, 'nvfp4r_no_pdl'):.1f} | {stock} | {us(shape, 1, 'bf16'):.1f} "
            f"| {ratios} | {line['of_read']:.0%} |"
        )
    rows += ["", "| M | geometric mean over Marlin | worst shape |", "|---|---|---|"]
    for M in TOKENS:
        values = [ratio(shape, M) for shape in shapes]
        mean = math.exp(sum(map(math.log, values)) / len(values))
        rows.append(f"| {M} | {mean:.2f}x | {min(values):.2f}x |")
    source = newest[shapes[0], 1, "nvfp4r"]
    rows += [
        "",
        f"{source['date']}, {source['gpu']}, driver {source['driver']}, torch {source['torch']}, "
        f"vLLM {source['vllm']}, read bandwidth {read:.2f} TB/s, commit {source['git']}: "
        f"`{source['command']}`",
    ]
    return "\n".join(rows)
