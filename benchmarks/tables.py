"""Rewrites the tables of docs/performance.md from benchmarks/results/*.jsonl.

    python benchmarks/tables.py

A table stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`. Of several measurements of
one thing the last line counts; older ones stay in the file as history. Whole models in vLLM need a
large GPU: their sections are there once they were measured, ahead of the goals not measured yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from table_e2e import e2e_table, plot_e2e, reset_table
from table_linear import linear_table, plot_linear
from table_prologue import prologue_table
from table_timeline import timeline_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "performance.md"
IMAGES = ROOT / "docs" / "images"
AHEAD_OF = "## Goals not measured yet\n"
SECTIONS = {
    "e2e": "## Decoding in vLLM from end to end\n\n![time per output token](images/e2e.svg)\n",
    "timeline": "### What a token's time is made of\n",
    "reset_vllm": "## ReSET in vLLM\n",
}

Line = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One row of a table: which measurement it shows, how, and what the goal was."""

    title: str
    match: dict[str, Any]
    figure: Callable[[Line], str]
    goal: str = "-"


def from_microseconds(line: Line) -> str:
    median, low, high = (line[f"{name}_us"] / 1e3 for name in ("median", "p10", "p90"))
    return f"{median:.2f} ms ({low:.2f} to {high:.2f})"


def from_seconds(line: Line) -> str:
    return f"{line['median_s']:.2f} s (slowest {line['slowest_s']:.2f})"


def quantise_speed(line: Line) -> str:
    return f"{from_microseconds(line)}, {line['bf16_gb_per_s']:.2f} GB/s of bf16"


def quantise_command(line: Line) -> str:
    return f"{from_seconds(line)}, peak memory {line['peak_memory_bytes'] / 1e6:.0f} MB"


def added(line: Line) -> str:
    ratios = (line[name] for name in ("on_over_off", "lowest_ratio", "highest_ratio"))
    median, low, high = (f"{100 * (ratio - 1):+.1f} %" for ratio in ratios)
    own = line["processor_ms"]
    return (
        f"{line['tpot_ms']:.1f} ms a token, {own:.2f} of them in the processor "
        f"({100 * own / line['tpot_ms']:.1f} %); pairs {median} ({low} to {high})"
    )


def plain(line: Line) -> str:
    return f"{line['tpot_ms']:.1f} ms a token"


def sampler_step(line: Line) -> str:
    return (
        f"{line['median_us']:.1f} us ({line['p10_us']:.1f} to {line['p90_us']:.1f}), "
        f"{line['over_floor']:.2f} of the floor"
    )


def floor(line: Line) -> str:
    return f"{line['median_us']:.1f} us"


def _sampler_rows() -> Iterable[Row]:
    for rows, goal in ((1, "<= 15 us"), (8, "<= 15 us"), (256, "<= 1.3 of the floor")):
        for cache in ("warm", "cold"):
            match = {"rows": rows, "dtype": "float32", "cache": cache}
            where = "in L2" if cache == "warm" else "not in L2"
            title = f"{rows} row{'s' * (rows > 1)}, logits {where}"
            yield Row(f"{title}: floor", {**match, "impl": "floor"}, floor)
            yield Row(
                f"{title}: `scale_logits`", {**match, "impl": "scale_logits"}, sampler_step, goal
            )
            yield Row(
                f"{title}: `RequestTracker.scale`",
                {**match, "impl": "tracker"},
                sampler_step,
                goal,
            )
            torch_path = {**match, "impl": "tracker_torch"}
            yield Row(f"{title}: the same in plain torch", torch_path, sampler_step)


def _overhead_rows() -> Iterable[Row]:
    for dtype in ("bfloat16", "float32"):
        for batch in (1, 8):
            match = {"model": "smollm2-135m", "dtype": dtype, "batch": batch}
            title = f"SmolLM2-135M in {dtype}, batch {batch}"
            off, on = ({**match, "impl": f"transformers_cpu_{name}"} for name in ("off", "on"))
            yield Row(f"{title}, plain", off, plain)
            yield Row(f"{title}, ReSET", on, added, "<= +10 %")


TABLES: dict[str, tuple[Row, ...]] = {
    "policy": (
        *(
            Row(
                f"policy and step detector, one token of {requests} requests",
                {"impl": "policy_and_detector_cpu", "requests": requests},
                from_microseconds,
                "<= 1 ms" if requests == 256 else "-",
            )
            for requests in (1, 8, 256)
        ),
        *(
            Row(
                f"entropy of {rows} x 151,936 logits",
                {"impl": "entropy_cpu", "rows": rows},
                from_microseconds,
            )
            for rows in (1, 8)
        ),
        Row(
            "step table of a vocabulary of 151,936",
            {"impl": "step_table", "vocabulary": 151_936},
            from_seconds,
            "<= 2 s",
        ),
    ),
    "quantize": (
        Row("`quantize`, 1536 x 4096", {"impl": "rtn_cpu", "N": 1536}, quantise_speed),
        Row(
            "`quantize` on a GPU, 24576 x 4096",
            {"impl": "rtn_cuda", "N": 24576},
            quantise_speed,
            ">= 1 GB/s of bf16",
        ),
        Row(
            "`reset-quantize`, SmolLM2-135M, W4A16",
            {"impl": "reset-quantize_rtn_w4a16", "model": "smollm2-135m"},
            quantise_command,
            "<= 20 s",
        ),
    ),
    "grading": (
        Row(
            "960 maths answers of 60,000 characters",
            {"impl": "maths", "answers": 960},
            from_seconds,
            "<= 60 s",
        ),
        Row("one program under 40 tests", {"impl": "code", "tests": 40}, from_seconds),
    ),
    "overhead": tuple(_overhead_rows()),
    "sampler": tuple(_sampler_rows()),
}


def read_lines(bench: str) -> list[Line]:
    text = (RESULTS / f"{bench}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def last(lines: list[Line], match: dict[str, Any]) -> Line:
    """The newest measurement with these values."""
    for line in reversed(lines):
        if all(line.get(key) == value for key, value in match.items()):
            return line
    raise ValueError(f"no measurement with {match}; run: make bench")


def table(bench: str) -> str:
    """The table of one benchmark in Markdown, and below it where its lines come from."""
    lines, used = read_lines(bench), []
    rows = ["| measured | result | goal |", "|---|---|---|"]
    for row in TABLES[bench]:
        line = last(lines, row.match)
        used.append(line)
        rows.append(f"| {row.title} | {row.figure(line)} | {row.goal} |")
    sources = dict.fromkeys(map(_source, used))
    return "\n".join([*rows, "", *sources])


def _source(line: Line) -> str:
    threads = "1 thread" if line["threads"] == 1 else f"{line['threads']} threads"
    return (
        f"{line['date']}, {line['gpu'] or line['cpu']}, {threads}, Python {line['python']}, "
        f"torch {line['torch']}, commit {line['git']}: `{line['command']}`"
    )


def render(document: str) -> str:
    """The document with every table written anew.

    Raises:
        ValueError: a table has no place in the document, or there is no measurement for a row.
    """
    tables = {bench: table(bench) for bench in TABLES}
    tables["linear"] = linear_table(read_lines("linear"))
    tables["prologue"] = prologue_table(read_lines("prologue"))

    def whole_step(lines: list[Line]) -> str:
        return timeline_table(lines, read_lines("linear"), read_lines("e2e"))

    written = {"e2e": e2e_table, "timeline": whole_step, "reset_vllm": reset_table}
    for bench, write in written.items():
        if (RESULTS / f"{bench}.jsonl").exists():
            document = with_section(document, bench)
            tables[bench] = write(read_lines(bench))
    for bench, text in tables.items():
        begin, end = f"<!-- begin: {bench} -->\n", f"<!-- end: {bench} -->"
        before, found_begin, rest = document.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"the document has no place for {bench}; add {begin.strip()} {end}")
        document = f"{before}{begin}{text}\n{end}{after}"
    return document


def with_section(document: str, bench: str) -> str:
    """The document with a place for this table; a new section where there is none."""
    if f"<!-- begin: {bench} -->\n" in document:
        return document
    section = f"{SECTIONS[bench]}\n<!-- begin: {bench} -->\n<!-- end: {bench} -->\n"
    before, found, after = document.partition(AHEAD_OF)
    return f"{before}{section}\n{found}{after}" if found else f"{before}\n{section}"


def main() -> None:
    DOCUMENT.write_text(render(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    plot_linear(read_lines("linear"), IMAGES / "linear.png")
    if (RESULTS / "e2e.jsonl").exists():
        plot_e2e(read_lines("e2e"), IMAGES / "e2e.svg")
    print(f"tables written to {DOCUMENT.relative_to(ROOT)}, plots to {IMAGES.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
