"""`nvfp4r bench`: how fast linear layers are on this GPU, and faster plans for it.

This module only prints; what is measured is tuning/bench.py's.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Table

from nvfp4r.checkpoint import load_checkpoint
from nvfp4r.console import EXIT_PROBLEM, count_progress, error_boundary, notes, output
from nvfp4r.plan import Plan
from nvfp4r.tuning.bench import (
    Machine,
    Measurement,
    MeasurementError,
    Tuning,
    TuningJob,
    job_candidates,
    measure,
    require_machine,
    require_tuned_file,
    tune_all,
    tuning_jobs,
)
from nvfp4r.tuning.matrix import Product
from nvfp4r.tuning.shapes import QWEN3_8B, Shape, checkpoint_shapes, parse_shape, parse_tokens
from nvfp4r.tuning.tuner import MIN_GAIN


class Dtype(str, Enum):
    """Of activations."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Activations(str, Enum):
    """What activations are rounded to."""

    NONE = "none"
    NVFP4 = "nvfp4"


def bench(
    model: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="NVFP4 checkpoint whose layers are measured."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="NxK", help="Outputs x inputs of a layer; may be repeated."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Tokens at once. 1,8,16 if not given; 1,8,16,32,48,64 with --tune."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the activations.")] = Dtype.BFLOAT16,
    activations: Annotated[
        Activations, typer.Option(help="What activations are rounded to: nvfp4 is W4A4.")
    ] = Activations.NONE,
    tune: Annotated[
        bool, typer.Option("--tune", help="First look for faster plans, and keep them for later.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Measure linear layers on the current GPU, beside cuBLAS with 16-bit weights.

    Without --model and --shape: the layers of Qwen3-8B. NVFP4R_TUNED_PLANS=0 leaves plans that
    --tune has found unused; they are kept beside the compiled kernels (NVFP4R_CACHE_DIR).

    Exit code: 0 if all was measured, 1 if a result is wrong or a time cannot be true, 2 if nothing
    can be measured here.
    """
    with error_boundary(debug):
        shapes = _shapes(model, shape or [])
        usual = "1,8,16,32,48,64" if tune else "1,8,16"
        counts = parse_tokens(usual if tokens is None else tokens)
        product = Product(getattr(torch, dtype.value), activations is Activations.NVFP4)
        jobs = tuning_jobs(shapes, counts) if tune else []
        with notes().status("loading the kernels, measuring the read bandwidth"):
            machine = require_machine()
        constant = {**product.as_dict(), **machine.as_dict()}

        def tell(result: Tuning | Measurement) -> None:
            if as_json:
                print(json.dumps({**result.as_dict(), **constant}), flush=True)

        try:
            tunings = _tune(jobs, product, machine, tell)
            measurements = _measure(shapes, counts, product, machine, tell)
        except MeasurementError as error:
            if debug:
                raise
            notes().print(f"[bold red]Error:[/bold red] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(EXIT_PROBLEM) from error
    if not as_json:
        if jobs:
            _print_tunings(tunings, machine)
        _print_measurements(measurements, product, machine)


def _shapes(model: Path | None, given: Sequence[str]) -> Sequence[Shape]:
    if model is not None and given:
        raise ValueError("--model and --shape: got both, need one of them or none")
    if model is not None:
        return checkpoint_shapes(load_checkpoint(model))
    return list(dict.fromkeys(map(parse_shape, given))) or QWEN3_8B


def _tune(
    jobs: Sequence[TuningJob],
    product: Product,
    machine: Machine,
    tell: Callable[[Tuning], None],
) -> list[Tuning]:
    found: list[Tuning] = []
    if not jobs:
        return found
    total = sum(len(job_candidates(job, product, machine.facts)) for job in jobs)
    with count_progress("tuning", total, "plans") as show:
        done = itertools.count(1)
        for tuning in tune_all(jobs, product, machine, advance=lambda: show(next(done))):
            found.append(tuning)
            tell(tuning)
    return found


def _measure(
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    product: Product,
    machine: Machine,
    tell: Callable[[Measurement], None],
) -> list[Measurement]:
    found: list[Measurement] = []
    with count_progress("measuring", len(shapes) * len(tokens), "products") as show:
        for measurement in measure(shapes, tokens, product, machine):
            found.append(measurement)
            tell(measurement)
            show(len(found))
    return found


def _print_tunings(tunings: Sequence[Tuning], machine: Machine) -> None:
    table = Table(title="Plans tried", title_justify="left", header_style="bold")
    table.add_column("layer", overflow="fold")
    for title in ("N x K", "M", "tried", "wrong", "rule us", "best us", "saved", "kept"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("best plan", overflow="fold")
    for tuning in tunings:
        verdict, shape = tuning.verdict, tuning.job.shape
        first, last = tuning.job.bounds
        times = [f"{verdict.default_us:.2f}", f"{verdict.best_us:.2f}", f"{verdict.gain:.1%}"]
        table.add_row(
            escape(shape.name),
            f"{shape.N} x {shape.K}",
            f"{first}..{last}",
            str(verdict.tried),
            f"[red]{len(verdict.wrong)}" if verdict.wrong else "0",
            *(times if verdict.best else ["-"] * 3),
            "[green]yes" if verdict.is_kept else "no",
            _plan_text(verdict.best[0]) if verdict.best else "none but the rule's",
        )
    output().print(table)
    path = escape(str(require_tuned_file(machine).path))
    output().print(
        f"Kept in {path}: what saves at least {MIN_GAIN:.0%} in a repeated measurement. Times are "
        "sums over the M measured.",
        soft_wrap=True,
    )


def _print_measurements(
    measurements: Sequence[Measurement], product: Product, machine: Machine
) -> None:
    facts = product.as_dict()
    table = Table(
        title=f"{machine.gpu}, driver {machine.driver or 'not told'}, torch {torch.__version__}, "
        f"reads {machine.read_tb_per_s:.2f} TB/s; {facts['dtype']}, activations "
        f"{facts['activations']}",
        title_justify="left",
        header_style="bold",
    )
    table.add_column("layer", overflow="fold")
    for title in ("N x K", "M", "us", "p10..p90", "TB/s", "of read", "cuBLAS us", "ratio"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("plan", overflow="fold")
    table.add_column("why", overflow="fold")
    for found in measurements:
        times = found.times
        table.add_row(
            escape(found.shape.name),
            f"{found.shape.N} x {found.shape.K}",
            str(found.M),
            f"{times['median_us']:.2f}",
            f"{times['p10_us']:.2f}..{times['p90_us']:.2f}",
            f"{found.tb_per_s:.2f}",
            f"{found.of_read:.0%}",
            f"{found.dense_us:.2f}",
            f"{found.over_dense:.2f}x",
            _plan_text(found.plan),
            escape(found.plan.reason),
        )
    output().print(table)


def _plan_text(plan: Plan) -> str:
    if plan.path == "unpack":
        return "unpack, then cuBLAS"
    rings = f"depth {plan.depth}" + (f" and {plan.x_depth}" if plan.x_depth else "")
    times = f"{plan.passes} times " if plan.passes > 1 else ""
    return f"{times}{plan.kernel}, grid {plan.grid}, cluster {plan.cluster}, {rings}"
