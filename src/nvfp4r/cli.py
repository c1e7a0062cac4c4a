"""`nvfp4r inspect` and `nvfp4r doctor`: what a checkpoint holds, what this machine can run.

This module only prints; the facts come from checkpoint/report.py and doctor.py. cli_bench.py has
the third command.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from nvfp4r.checkpoint import load_checkpoint
from nvfp4r.checkpoint.dialects import CONFIG_FILE, CONFIG_KEYS, SIDE_FILE, read_json
from nvfp4r.checkpoint.report import CheckpointReport, TensorReport, collapse, inspect_checkpoint
from nvfp4r.checkpoint.shards import ShardedTensors
from nvfp4r.cli_bench import bench
from nvfp4r.console import (
    EXIT_PROBLEM,
    error_boundary,
    format_bytes,
    notes,
    output,
    tensor_progress,
)
from nvfp4r.doctor import Diagnosis, diagnose
from nvfp4r.naming import counted, group_pattern, layer_pattern, plural

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="NVFP4 checkpoints: look into them, and see what this machine can run, and how fast.",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command("inspect")
def inspect_command(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="Folder of a checkpoint.")],
    show_all: Annotated[
        bool, typer.Option("--all", help="One line per tensor; repeated layers share one if not.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Read an NVFP4 checkpoint and list its tensors and all its problems.

    Exit code: 0 without problems, 1 with problems or if it is not NVFP4, 2 if there is no folder.
    """
    with error_boundary(debug):
        if not checkpoint.is_dir():
            raise ValueError(f"{checkpoint}: no such folder, need one with {CONFIG_FILE} in it")
    try:
        opened = load_checkpoint(checkpoint, check=False)
    except ValueError as error:
        if debug:
            raise
        _print_unopened(checkpoint, _plain_model(checkpoint) or str(error), as_json)
        raise typer.Exit(EXIT_PROBLEM) from error
    with error_boundary(debug), tensor_progress("reading") as advance:
        report = inspect_checkpoint(opened, advance)
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _print_report(report, show_all)
    if report.problems:
        raise typer.Exit(EXIT_PROBLEM)


def _plain_model(folder: Path) -> str | None:
    """A sentence about a model that is not quantised; None if the folder is anything else."""
    try:
        config = read_json(folder / CONFIG_FILE)
        infos = list(ShardedTensors(folder).infos.values())
    except ValueError:
        return None
    if (folder / SIDE_FILE).exists() or any(config.get(key) is not None for key in CONFIG_KEYS):
        return None
    dtypes = ", ".join(counted(info.dtype for info in infos))
    size = format_bytes(sum(info.nbytes for info in infos))
    return (
        f"{folder}: a model that is not quantised ({config.get('model_type', 'unknown type')}, "
        f"{len(infos)} tensors, {size}, {dtypes}). Quantise it: "
        f"reset-quantize --model {folder} --output {folder.resolve()}-NVFP4"
    )


def _print_unopened(folder: Path, reason: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"path": str(folder), "problems": [reason]}, indent=2))
    else:
        output().print(escape(reason), soft_wrap=True)


def _print_report(report: CheckpointReport, show_all: bool) -> None:
    console = output()
    _print_tensors(console, report.tensors, show_all)
    bits = report.quantised_bits
    kind = {"nvfp4": "W4A4 (static input scales)", "none": "W4A16 (weights only)"}
    facts = [
        ("checkpoint", str(report.path)),
        ("dialect", f"{report.dialect}, {kind[report.activations]}"),
        ("rotation", "inputs in blocks of 16 (hadamard16)" if report.rotation else "none"),
        ("written by", report.producer or "not told"),
        (
            "quantised",
            f"{plural(len(report.quantised), 'module')}, "
            + ("none" if bits is None else f"{bits:.3f} bits per parameter"),
        ),
        (
            "in all",
            f"{len(report.tensors)} tensors, {report.parameters:,} parameters, "
            f"{format_bytes(report.nbytes)}, "
            f"{8 * report.nbytes / max(1, report.parameters):.2f} bits per parameter",
        ),
        ("unquantised", ", ".join(counted(map(layer_pattern, report.exclude))) or "none excluded"),
        ("fused groups", _fused_groups(report)),
        ("KV cache", _kv_cache(report)),
    ]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, escape(value))
    console.print(table)
    if report.problems:
        console.print(f"[bold red]{plural(len(report.problems), 'problem')}[/bold red]")
        for problem in report.problems:
            console.print(f"- {escape(problem)}", soft_wrap=True)
    else:
        console.print("[bold green]no problems[/bold green]")


def _fused_groups(report: CheckpointReport) -> str:
    if not report.unequal_groups:
        return f"{report.groups}, the members of each share one global scale"
    worst = max(report.unequal_groups, key=lambda group: group.ratio)
    names = ", ".join(counted(group_pattern(group.members) for group in report.unequal_groups))
    return (
        f"{report.groups}, of which {len(report.unequal_groups)} have members with different "
        f"global scales (allowed; largest ratio {worst.ratio:.3f} in "
        f"{worst.members[0].rpartition('.')[0]}): {names}"
    )


def _kv_cache(report: CheckpointReport) -> str:
    scales = list(report.kv_scales.values())
    found = f"{plural(len(scales), 'scale')}, {_range(scales)}" if scales else "no scales"
    return f"{report.kv_cache or 'not quantised'}, {found}"


_ANY_WIDTH = 10_000  # of a table that nothing limits
# Columns of the table of tensors that a narrow terminal goes without, the first one first.
_LEFT_OUT = ("input scale", "block scales", "saturated", "bits", "count", "kind")


def _print_tensors(console: Console, tensors: Sequence[TensorReport], show_all: bool) -> None:
    """The table of tensors, with as many columns as the terminal is wide."""
    groups = [(tensor,) for tensor in tensors] if show_all else collapse(tensors)
    rows = [_tensor_row(group) for group in groups]
    titles = list(rows[0]) if rows else []
    missing: list[str] = []
    while True:
        table = Table(header_style="bold")
        for title in titles:
            is_name = title == "module"
            table.add_column(
                title,
                justify="left" if is_name else "right",
                overflow="fold" if is_name else "ellipsis",
                no_wrap=not is_name,
            )
        for row in rows:
            table.add_row(*(row[title] for title in titles))
        unlimited = console.options.update_width(_ANY_WIDTH)
        width = Measurement.get(console, unlimited, table).maximum
        if width <= console.width or len(missing) == len(_LEFT_OUT):
            break
        missing.append(_LEFT_OUT[len(missing)])
        titles.remove(missing[-1])
    console.print(table)
    if missing:
        console.print(
            f"for want of width, without: {', '.join(missing)}; --json has them", soft_wrap=True
        )


def _tensor_row(group: Sequence[TensorReport]) -> dict[str, str]:
    first = group[0]
    blocks = [
        scale
        for tensor in group
        for scale in (tensor.block_scale_min, tensor.block_scale_max)
        if scale is not None
    ]
    return {
        "module": escape(first.module if len(group) == 1 else layer_pattern(first.module)),
        "count": str(len(group)),
        "N x K": " x ".join(map(str, first.shape)) or "1",
        "kind": first.kind,
        "bits": _range([tensor.bits_per_parameter for tensor in group], "{:.2f}"),
        "global scale": _range([t.global_scale for t in group if t.global_scale is not None]),
        "block scales": _range(blocks, "{:g}"),
        "saturated": _range(
            [t.saturated_share for t in group if t.saturated_share is not None], "{:.1%}"
        ),
        "input scale": _range([t.input_scale for t in group if t.input_scale is not None]),
    }


def _range(values: Sequence[float], form: str = "{:.3g}") -> str:
    """ "low..high", one number if they print alike, a dash if there are none."""
    if not values:
        return "-"
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low}..{high}"


@app.command()
def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """Show this machine, the versions installed, and which parts will run here.

    Exit code: 0 if the parts that need no GPU run, 1 if not.
    """
    with error_boundary(debug):
        diagnosis = diagnose()
    if as_json:
        print(json.dumps(diagnosis.as_dict(), indent=2))
    else:
        _print_diagnosis(diagnosis)
    if not diagnosis.basics_work:
        raise typer.Exit(EXIT_PROBLEM)


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    memory = "memory not told"
    if diagnosis.memory_bytes is not None:
        memory = f"{format_bytes(diagnosis.memory_bytes)} of memory"
        if diagnosis.available_bytes is not None:
            memory += f", {format_bytes(diagnosis.available_bytes)} free"
    cuda = f"CUDA {diagnosis.torch_cuda}" if diagnosis.torch_cuda else "CPU build"
    facts = [
        ("nvfp4r", diagnosis.nvfp4r),
        ("Python", diagnosis.python),
        ("system", diagnosis.system),
        ("CPU", f"{diagnosis.cpu_cores} cores, {memory}"),
    ]
    for package in diagnosis.packages:
        text = package.version or "not installed"
        text += f" ({cuda})" if package.name == "torch" else ""
        if package.version and not package.fits:
            text += f" - need {package.needed}"
        facts.append((package.name, text))
    facts.append(("NVIDIA driver", diagnosis.driver or "none"))
    for gpu in diagnosis.gpus:
        major, minor = gpu.capability
        text = f"{gpu.name}, capability {major}.{minor}, {format_bytes(gpu.memory_bytes)}"
        facts.append((f"GPU {gpu.index}", text))
    if not diagnosis.gpus:
        facts.append(("GPU", "none"))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, escape(value))
    parts = Table("what", "runs", "why", title="What runs here", title_justify="left")
    for part in diagnosis.parts:
        parts.add_row(part.name, "[green]yes" if part.runs else "[yellow]no", escape(part.reason))
    console = output()
    console.print(table)
    console.print(parts)
    for warning in diagnosis.cuda_warnings:
        notes().print(f"torch: {escape(warning)}", soft_wrap=True)


app.command()(bench)


def main() -> None:
    """Entry point of `nvfp4r`."""
    app()


if __name__ == "__main__":
    main()
