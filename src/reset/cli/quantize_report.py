"""What `reset-quantize` says: the plan before any work, the report after it."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from nvfp4r.checkpoint.writer import SaveReport
from nvfp4r.console import format_bytes, output
from nvfp4r.naming import counted, group_pattern, layer_pattern
from nvfp4r.selection import ConversionPlan

_STATUS = Path("/proc/self/status")


def summary_of(
    plan: ConversionPlan,
    report: SaveReport,
    *,
    method: str,
    seconds: float,
    calibration: dict[str, Any] | None,
) -> dict[str, Any]:
    """The report as JSON has it.

    Args:
        calibration: data, samples and tokens; of methods that say so, "inputs" too, one entry for
            each layer or group that shares inputs.
    """
    infos = plan.tensors.infos
    values = sum(torch.Size(info.shape).numel() for info in infos.values())
    return {
        "model": str(plan.source),
        "output": str(report.path),
        "files": list(report.files),
        "method": method,
        "quantised_modules": report.modules,
        "fused_groups": [list(group) for group in plan.groups],
        "unquantised": plan.kept,
        "excluded_in_config": list(plan.exclude),
        "calibration": calibration,
        "source_bytes": plan.source_bytes,
        "output_bytes": report.tensor_bytes,
        "bits_per_quantised_parameter": report.bits_per_parameter,
        "bits_per_parameter": 8 * report.tensor_bytes / values,
        "peak_memory_bytes": peak_memory_bytes(),
        "seconds": seconds,
    }


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far.

    On Linux that is VmHWM: ru_maxrss begins with what the parent held when it started this process.
    """
    if _STATUS.exists():
        found = re.search(r"^VmHWM:\s*(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
        if found:
            return 1024 * int(found[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def print_plan(plan: ConversionPlan) -> None:
    """What will be quantised and what stays."""
    kept: dict[str, list[str]] = {}
    for name, reason in plan.kept.items():
        kept.setdefault(reason, []).append(layer_pattern(name.removesuffix(".weight")))
    shared = counted(group_pattern(group) for group in plan.groups)
    rows = [
        ("model", f"{plan.source} ({plan.config.get('model_type', 'unknown type')})"),
        ("to quantise", _lines(counted(layer_pattern(name) for name in plan.quantised))),
        ("shared scales", _lines(shared) or "no groups of layers that engines fuse"),
        ("unquantised", _lines(f"{k}: {', '.join(counted(v))}" for k, v in kept.items())),
    ]
    _print_facts(rows)


def print_summary(summary: dict[str, Any]) -> None:
    """The report of `summary_of` as a text."""
    before, after = summary["source_bytes"], summary["output_bytes"]
    rows = [
        ("written", f"{summary['output']} ({', '.join(summary['files'])})"),
        ("method", summary["method"]),
        *_calibration_rows(summary["calibration"]),
        (
            "size",
            f"{format_bytes(before)} -> {format_bytes(after)} ({before / after:.2f}x smaller)",
        ),
        (
            "bits",
            f"{summary['bits_per_quantised_parameter']:.3f} per quantised parameter, "
            f"{summary['bits_per_parameter']:.2f} over the whole model",
        ),
        ("peak memory", f"{format_bytes(summary['peak_memory_bytes'])}, with Python and torch"),
        ("time", f"{summary['seconds']:.1f} s"),
        ("next", f"nvfp4r inspect {summary['output']}"),
    ]
    _print_facts(rows)


def _calibration_rows(calibration: dict[str, Any] | None) -> list[tuple[str, str]]:
    if calibration is None:
        return []
    text = f"{calibration['samples']} texts, {calibration['tokens']:,} tokens"
    rows = [("calibrated on", f"{calibration['data']}: {text}")]
    inputs = calibration.get("inputs", [])
    singular = [x for x in inputs if x["singular"] and not x["rounded_to_nearest"]]
    for title, found in (
        ("singular, damped", _patterns(singular)),
        ("to nearest", _patterns(x for x in inputs if x["rounded_to_nearest"])),
    ):
        if found:
            rows.append((title, _lines(found)))
    return rows


def _patterns(inputs: Iterable[dict[str, Any]]) -> list[str]:
    return counted(_pattern(tuple(x["modules"])) for x in inputs)


def _pattern(modules: Sequence[str]) -> str:
    return group_pattern(tuple(modules)) if len(modules) > 1 else layer_pattern(modules[0])


def _print_facts(rows: Iterable[tuple[str, str]]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(value))
    output().print(table)


def _lines(texts: Iterable[str]) -> str:
    return "\n".join(texts)
