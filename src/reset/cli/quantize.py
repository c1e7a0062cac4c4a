"""`reset-quantize`: a Hugging Face model in, an NVFP4 checkpoint out."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from nvfp4r.atomic import check_target, require_space
from nvfp4r.console import (
    count_progress,
    error_boundary,
    format_bytes,
    notes,
    output,
    tensor_progress,
)
from nvfp4r.convert import METHODS, check_method, convert, weight_maxima
from nvfp4r.dialects import CONFIG_FILE
from nvfp4r.naming import counted, group_pattern, layer_pattern
from nvfp4r.selection import ConversionPlan, plan_conversion
from nvfp4r.writer import SaveReport
from reset.cli import options
from reset.hub import model_folder
from reset.texts import read_texts

DEFAULT_SAMPLES = 128
DEFAULT_TOKENS = 2048

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Activations(str, Enum):
    NVFP4 = "nvfp4"
    NONE = "none"


class Format(str, Enum):
    MODELOPT = "modelopt"
    COMPRESSED_TENSORS = "compressed-tensors"


@app.command()
def quantize(
    model: Annotated[
        str, typer.Option(help="Folder of a BF16, FP16 or FP32 model, or its name on the hub.")
    ],
    output_folder: Annotated[
        Path, typer.Option("--output", help="Folder to make; appears when it is whole.")
    ],
    method: Annotated[
        str, typer.Option(help=f"{', '.join(METHODS)}: round to nearest, ties to even.")
    ] = "rtn",
    activations: Annotated[
        Activations,
        typer.Option(help="none: W4A16. nvfp4: W4A4 with static scales, needs --calib-data."),
    ] = Activations.NONE,
    dialect: Annotated[
        Format, typer.Option("--format", help="Layout of the output; vLLM reads both.")
    ] = Format.MODELOPT,
    calib_data: Annotated[
        str | None,
        typer.Option(
            help="W4A4: .txt (texts between blank lines), .jsonl (text, or question/problem and "
            "answer/solution), or a hub data set NAME[:CONFIG[:SPLIT]]."
        ),
    ] = None,
    calib_samples: Annotated[
        int, typer.Option(help="W4A4: texts to run, at most.", min=1)
    ] = DEFAULT_SAMPLES,
    calib_tokens: Annotated[
        int, typer.Option(help="W4A4: tokens of each text, at most.", min=1)
    ] = DEFAULT_TOKENS,
    headroom: Annotated[
        float, typer.Option(help="W4A4: factor >= 1 on the largest activation seen.")
    ] = 1.0,
    device: options.Device = "cpu",
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            help="Layer to leave alone: name, glob ('*.down_proj') or 're:' and a regular "
            "expression. May be repeated."
        ),
    ] = None,
    quantize_lm_head: Annotated[
        bool,
        typer.Option(
            "--quantize-lm-head",
            help="Quantise the output head too; only where it is not tied to the embedding.",
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing checkpoint.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON instead of text.")
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Quantise the linear layers of a model to NVFP4 (4.5 bits per weight).

    Embeddings, norms and routers stay as they are, as does the output head unless it is asked for.
    Weights alone need about the memory of one output file (4 GB at most) and of the largest layers;
    W4A4 loads the whole model once to calibrate, on a CPU in float32.
    """
    start = time.monotonic()
    with error_boundary(debug):
        check_method(method)
        _check_calibration(activations, calib_data, headroom)
        target = options.checked_device(device)
        # Imported late: transformers takes seconds, and the checks above need none of it.
        from reset.cli.source_model import check_linear_layers

        source = model_folder(model)
        check_target(output_folder, marker=CONFIG_FILE, force=force, source=source)
        plan = plan_conversion(source, exclude or [], quantise_head=quantize_lm_head)
        require_space(output_folder, plan.output_bytes)
        unchecked = check_linear_layers(plan)
        rows = []
        if calib_data is not None:
            rows = _calibration_rows(plan, calib_data, calib_samples, calib_tokens)
        if not as_json:
            _print_plan(plan)
        if unchecked:
            notes().print(f"[yellow]note:[/yellow] {escape(unchecked)}", soft_wrap=True)

        with tensor_progress("checking") as advance:
            maxima = weight_maxima(plan, device=target, progress=advance)
        input_amax, calibration = None, None
        if calib_data is not None:
            input_amax = _calibrate(plan, rows, target)
            tokens = sum(row.numel() for row in rows)
            calibration = {"data": calib_data, "samples": len(rows), "tokens": tokens}
        with tensor_progress("quantising") as advance:
            report = convert(
                plan,
                output_folder,
                maxima,
                method=method,
                dialect=dialect.value,
                activations=activations.value,
                input_amax=input_amax,
                headroom=headroom,
                device=target,
                force=force,
                progress=advance,
            )
        summary = _summary(plan, report, time.monotonic() - start, calibration)
        if as_json:
            print(json.dumps(summary, indent=2))
        else:
            _print_summary(summary)


def _check_calibration(activations: Activations, calib_data: str | None, headroom: float) -> None:
    if activations is Activations.NVFP4:
        if calib_data is None:
            raise ValueError(
                "--activations nvfp4 needs input scales, which come from running the model over "
                "texts: give some with --calib-data FILE.txt, FILE.jsonl or a hub data set"
            )
        if not 1.0 <= headroom < float("inf"):
            raise ValueError(f"--headroom is {headroom}, need a finite factor >= 1")
        return
    for flag, is_given in (("--calib-data", calib_data is not None), ("--headroom", headroom != 1)):
        if is_given:
            raise ValueError(
                f"{flag} is for quantised activations, but --activations is none; add "
                f"--activations nvfp4, or leave {flag} out"
            )


def _calibration_rows(
    plan: ConversionPlan, data: str, samples: int, max_tokens: int
) -> list[Tensor]:
    """Token ids of the calibration texts; says so if there are fewer than asked for."""
    from reset.cli.source_model import load_tokenizer, token_rows

    context = plan.config.get("max_position_embeddings")
    if isinstance(context, int):
        max_tokens = min(max_tokens, context)
    rows = token_rows(read_texts(data, samples), load_tokenizer(plan.source), max_tokens)
    if len(rows) < samples:
        notes().print(f"{escape(data)} holds {len(rows)} texts; all are used", soft_wrap=True)
    return rows


def _calibrate(plan: ConversionPlan, rows: list[Tensor], device: torch.device) -> dict[str, Tensor]:
    """Largest input of every quantised layer."""
    from nvfp4r.calibration import calibrate
    from reset.cli.source_model import load_source_model

    model = load_source_model(plan.source, device)
    with count_progress("calibrating", len(rows), "texts") as advance:
        return calibrate(model, rows, list(plan.quantised), lambda done, tokens: advance(done))


def _summary(
    plan: ConversionPlan, report: SaveReport, seconds: float, calibration: dict[str, Any] | None
) -> dict[str, Any]:
    infos = plan.tensors.infos
    values = sum(torch.Size(info.shape).numel() for info in infos.values())
    return {
        "model": str(plan.source),
        "output": str(report.path),
        "files": list(report.files),
        "quantised_modules": report.modules,
        "fused_groups": [list(group) for group in plan.groups],
        "unquantised": plan.kept,
        "excluded_in_config": list(plan.exclude),
        "calibration": calibration,
        "source_bytes": plan.source_bytes,
        "output_bytes": report.tensor_bytes,
        "bits_per_quantised_parameter": report.bits_per_parameter,
        "bits_per_parameter": 8 * report.tensor_bytes / values,
        "peak_memory_bytes": _peak_memory_bytes(),
        "seconds": seconds,
    }


def _peak_memory_bytes() -> int:
    """Largest resident memory of this process so far; Linux counts in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _print_plan(plan: ConversionPlan) -> None:
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


def _print_summary(summary: dict[str, Any]) -> None:
    before, after = summary["source_bytes"], summary["output_bytes"]
    calibration = summary["calibration"]
    rows = [
        ("written", f"{summary['output']} ({', '.join(summary['files'])})"),
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
    if calibration:
        text = f"{calibration['samples']} texts, {calibration['tokens']:,} tokens"
        rows.insert(1, ("calibrated on", f"{calibration['data']}: {text}"))
    _print_facts(rows)


def _print_facts(rows: Iterable[tuple[str, str]]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(value))
    output().print(table)


def _lines(texts: Iterable[str]) -> str:
    return "\n".join(texts)


def main() -> None:
    """Entry point of `reset-quantize`."""
    app()


if __name__ == "__main__":
    main()
