"""A picture that moves: the three engines write the same text at the speeds that were measured.

    python benchmarks/recording.py --model qwen3-32b

Reads results/e2e.jsonl (batch 1, the newest line of each engine) and writes an SVG that any page
can show as an image: CSS animates it, nothing is run. The models measured have random weights, so
the text is this file's own; a word or a mark of it counts as one token.
"""

from __future__ import annotations

import argparse
import json
import re
from html import escape
from pathlib import Path
from typing import Any

from table_e2e import Figures

ROOT = Path(__file__).parents[1]
ENGINES = {"bf16": "BF16", "stock": "NVFP4, vLLM's own kernels", "nvfp4r": "NVFP4, nvfp4r"}
TEXT = """\
How many whole numbers from 1 to 1,000 are
divisible by 3 or by 5, but not by both?
First, count the multiples of each. 1,000 /
3 = 333.3, so there are 333 multiples of 3.
1,000 / 5 = 200, so there are 200 multiples
of 5. Numbers divisible by both are the
multiples of 15, and 1,000 / 15 = 66.7, so
there are 66 of them.

Next, think about what the question leaves
out. Each of these 66 numbers was counted
once among the multiples of 3 and once
among the multiples of 5. We want none of
them, so we take them away from both
counts: 333 - 66 = 267 and 200 - 66 = 134.

Together that is 267 + 134 = 401. Let me
check this in another way. Of the numbers 1
to 15, the ones that count are 3, 5, 6, 9,
10 and 12; 15 itself is divisible by both.
That makes 6 in every block of 15. There
are 66 whole blocks up to 990, so 66 x 6 =
396. The rest are 991 to 1,000: 993, 995,
996, 999 and 1,000. That is 5 more, and 396
+ 5 = 401. Both ways agree.

The answer is 401."""
WIDTH, LEFT, LINE, PANEL_TOP = 1000, 24, 15, 84  # px
COLUMN, GAP = 308, 14
REST_S = 3.0  # behind the slowest engine, before it begins anew
STYLE = """\
svg { --page: #ffffff; --panel: #f6f8fa; --edge: #d0d7de; --ink: #1f2328; --soft: #59636e;
  --ours: #0969da }
@media (prefers-color-scheme: dark) { svg { --page: #0d1117; --panel: #151b23; --edge: #3d444d;
  --ink: #f0f6fc; --soft: #9198a1; --ours: #4493f8 } }
.page { fill: var(--page) } .panel, .cover { fill: var(--panel) } .panel { stroke: var(--edge) }
text { fill: var(--ink); font-family: system-ui, sans-serif; font-size: 14px }
.head { font-size: 18px; font-weight: 600 } .name { font-weight: 600 } .soft { fill: var(--soft) }
.soft, .written { font-size: 12px }
.written { font: 10.5px ui-monospace, Menlo, Consolas, monospace; white-space: pre }
.bar { fill: var(--soft) } .nvfp4r .bar { fill: var(--ours) }
.nvfp4r .name, .nvfp4r .done { fill: var(--ours) } .done { font-weight: 600; text-anchor: end }
.bar, .cover { transform-box: fill-box } .bar { transform-origin: left }
.cover { transform-origin: right }
@media (prefers-reduced-motion: reduce) { .cover { display: none }
  .bar, .done { animation: none !important } }
"""


def tokens(line: str) -> int:
    """Words, numbers and marks."""
    return len(re.findall(r"\d[\d,.]*\d|\w+|[^\w\s]", line))


def lines_of(path: Path, model: str) -> dict[str, dict[str, Any]]:
    """The newest line of each engine at batch 1.

    Raises:
        ValueError: the model was not measured with all three.
    """
    measured = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    figures = Figures(measured)
    found = {impl: figures.decoding(model, impl).get(1) for impl in ENGINES}
    missing = [impl for impl, line in found.items() if line is None]
    if missing:
        raise ValueError(
            f"{path} has no figures of {model} at batch 1 for {', '.join(missing)}; "
            f"run: python benchmarks/e2e.py --shape {model} --batches 1"
        )
    return {impl: line for impl, line in found.items() if line is not None}


def draw(found: dict[str, dict[str, Any]]) -> str:
    """The SVG; `found` has `tpot_ms` by engine, and where and when it was measured."""
    text = TEXT.splitlines()
    counts = [tokens(line) for line in text]
    total = sum(counts)
    cycle = max(line["tpot_ms"] for line in found.values()) * total / 1e3 + REST_S
    height = PANEL_TOP + 74 + LINE * len(text) + 60
    rules, panels = [], []
    for index, (impl, title) in enumerate(ENGINES.items()):
        token_s = found[impl]["tpot_ms"] / 1e3
        left = LEFT + index * (COLUMN + GAP)
        panels += _panel(impl, title, left, found[impl]["tpot_ms"], total, len(text))
        rules.append(_rule(f"{impl}-bar", "scaleX(0)", "scaleX(1)", 0, total * token_s / cycle))
        rules.append(_appears(f"{impl}-done", total * token_s / cycle))
        written = 0
        for number, (line, count) in enumerate(zip(text, counts, strict=True)):
            if not count:
                continue
            y = PANEL_TOP + 74 + LINE * number
            panels.append(
                f'<text class="written" x="{left + 12}" y="{y}">{escape(line)}</text>'
                f'<rect class="cover" x="{left + 11}" y="{y - 11}" width="{COLUMN - 22}" '
                f'height="{LINE}" style="animation: {impl}-{number} {cycle:.3f}s linear infinite"/>'
            )
            begin, end = (at * token_s / cycle for at in (written, written + count))
            rules.append(_rule(f"{impl}-{number}", "scaleX(1)", "scaleX(0)", begin, end))
            written += count
        panels.append("</g>")
    one = found["nvfp4r"]
    head = f"{one['model']} in vLLM {one['vllm']}, {one['gpu'] or one['cpu']}, batch 1"
    foot = (
        f"Replayed at measured speed: time per output token of random weights, {one['date']}. "
        "Sample text, the same for all; a word or mark is one token."
    )
    timed = "\n".join(
        f".{impl} .bar {{ animation: {impl}-bar {cycle:.3f}s linear infinite }} "
        f".{impl} .done {{ animation: {impl}-done {cycle:.3f}s linear infinite }}"
        for impl in ENGINES
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(head)}</title>",
            f"<style>\n{STYLE}{timed}\n" + "\n".join(rules) + "\n</style>",
            f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
            f'<text class="head" x="{LEFT}" y="40">{escape(head)}</text>',
            *panels,
            f'<text class="soft" x="{LEFT}" y="{height - 20}">{escape(foot)}</text>',
            "</svg>\n",
        ]
    )


def _panel(impl: str, title: str, left: int, tpot_ms: float, total: int, rows: int) -> list[str]:
    wide = COLUMN - 24
    return [
        f'<g class="{impl}">',
        f'<rect class="panel" x="{left}" y="{PANEL_TOP - 20}" width="{COLUMN}" '
        f'height="{90 + LINE * rows}" rx="6"/>',
        f'<text class="name" x="{left + 12}" y="{PANEL_TOP + 4}">{escape(title)}</text>',
        f'<text class="soft" x="{left + 12}" y="{PANEL_TOP + 24}">{tpot_ms:.2f} ms per token, '
        f"{1e3 / tpot_ms:.0f} tokens/s</text>",
        f'<text class="done" x="{left + COLUMN - 12}" y="{PANEL_TOP + 4}">'
        f"{total * tpot_ms / 1e3:.1f} s</text>",
        f'<rect class="bar" x="{left + 12}" y="{PANEL_TOP + 36}" width="{wide}" height="4"/>',
    ]


def _rule(name: str, before: str, after: str, begin: float, end: float) -> str:
    """Keyframes: `before` until `begin`, `after` from `end` on; shares of the cycle."""
    return (
        f"@keyframes {name} {{ 0%, {begin:.4%} {{ transform: {before} }} "
        f"{end:.4%}, 100% {{ transform: {after} }} }}"
    )


def _appears(name: str, at: float) -> str:
    return (
        f"@keyframes {name} {{ 0%, {at:.4%} {{ opacity: 0 }} "
        f"{at + 0.001:.4%}, 100% {{ opacity: 1 }} }}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-32b")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks" / "results" / "e2e.jsonl"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "e2e-demo.svg")
    arguments = parser.parse_args()
    picture = draw(lines_of(arguments.results, arguments.model))
    arguments.out.write_text(picture, encoding="utf-8")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
