"""`reset-calibrate`: tau_0 of a model from its own entropies; T_low and T_high by a search."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from nvfp4r.console import error_boundary, notes, output
from reset.calibrate import DEFAULT_PERCENTILE, Calibration, text_sha256
from reset.cli import engines, options
from reset.cli.calibrate_search import SearchFlags, run_search, search_folder, search_plan
from reset.cli.calibrate_tau0 import (
    ThresholdFlags,
    check_same_flags,
    check_same_model,
    find_or_take,
    read_threshold_problems,
)
from reset.cli.run_tables import search_table, threshold_table
from reset.config import ReSETConfig
from reset.evaluate.held_out import text_hashes
from reset.evaluate.search import T_HIGHS, T_LOWS
from reset.evaluate.tasks import TASKS
from reset.presets import check_entry_target, has_entry

app = typer.Typer(add_completion=False)


def _listed(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)


@app.command()
def calibrate(
    model: options.Model,
    output_file: Annotated[Path, typer.Option("--output", help="File to write (.json).")],
    name: Annotated[
        str | None,
        typer.Option(help="Keep it in --output under this name, beside those of other models."),
    ] = None,
    data: Annotated[
        str,
        typer.Option(help=".jsonl or .txt file, or hub data set, of problems that no test uses."),
    ] = "AI-MO/NuminaMath-1.5",
    apart_from: Annotated[
        list[Path] | None,
        typer.Option(help="Problems of an evaluation (.jsonl): these are left out."),
    ] = None,
    num_problems: Annotated[int, typer.Option(help="Problems to decode for tau_0.")] = 5,
    percentile: Annotated[float, typer.Option(help="0 .. 100.")] = DEFAULT_PERCENTILE,
    temperature: Annotated[
        float, typer.Option(help="Fixed temperature of the decoding for tau_0.")
    ] = 0.6,
    top_p: options.TopP = 0.95,
    max_tokens: Annotated[int, typer.Option(help="Output limit of an answer.")] = 8192,
    batch_size: Annotated[int, typer.Option(help="Problems decoded at once for tau_0.")] = 8,
    tau0: Annotated[
        float | None, typer.Option("--tau0", help="Take this tau_0, nats, instead of finding it.")
    ] = None,
    t_low: options.TLow = None,
    t_high: options.THigh = None,
    seed: Annotated[
        int,
        typer.Option(help="Of tau_0's first batch, later ones add 1; of the search's sample 0."),
    ] = 0,
    search: Annotated[
        bool, typer.Option("--search", help="Then find T_low and T_high; --data needs answers.")
    ] = False,
    task: Annotated[
        str, typer.Option(help=f"How --data's records are read: {', '.join(TASKS)}.")
    ] = "jsonl",
    search_problems: Annotated[
        int, typer.Option(help="Problems of the search, none of them tau_0's.")
    ] = 100,
    n_samples: Annotated[int, typer.Option(help="Answers to each problem in every arm.")] = 4,
    t_lows: Annotated[str, typer.Option(help="T_low of the grid, a list.")] = _listed(T_LOWS),
    t_highs: Annotated[str, typer.Option(help="T_high of the grid, a list.")] = _listed(T_HIGHS),
    engine: engines.EngineName = "hf",
    backend: engines.Backend = "auto",
    thinking: engines.Thinking = None,
    prompt: engines.Prompt = "task",
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Take tau_0 from --output, and go on with its search."),
    ] = False,
    device: engines.Device = None,
    dtype: options.Dtype = "auto",
    activations: options.Activations = "checkpoint",
    tp: engines.TensorParallel = 1,
    concurrency: engines.Concurrency = 8,
    timeout: engines.Timeout = 3600.0,
    retries: engines.Retries = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    debug: options.Debug = False,
) -> None:
    """Find tau_0: the 80th percentile of raw-logit token entropy over a few held-out problems.

    The model that will be served must decode them itself: the NVFP4 one, not its BF16 source.
    --search goes on to T_low and T_high: every pair of the grid, beside greedy and the fixed
    temperatures 0.3, 0.6 and 1.0, on further problems; it ends in one recommendation, which may be
    a fixed temperature, or none. Without it --t-low and --t-high are stored as given.
    """
    with error_boundary(debug):
        check_entry_target(output_file, name)
        choice = engines.Choice(
            name=engine,
            model=model,
            backend=backend,
            device=device,
            dtype=dtype,
            activations=activations,
            tp=tp,
            concurrency=concurrency,
            timeout_s=timeout,
            retries=retries,
            thinking=thinking,
        )
        temperatures = _checked_temperatures(t_low, t_high, search)
        threshold = ThresholdFlags(
            data=data,
            problems=num_problems,
            percentile=percentile,
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens,
            batch_size=batch_size,
            seed=seed,
            thinking=thinking,
            tau0=tau0,
        )
        flags = SearchFlags(
            data=data,
            task=task,
            problems=search_problems,
            n_samples=n_samples,
            t_lows=t_lows,
            t_highs=t_highs,
            max_tokens=max_tokens,
            top_p=top_p,
            seed=seed,
            prompt=prompt,
            folder=search_folder(output_file, name),
        )
        if resume and not search:
            raise ValueError("--resume goes on with a search; pass --search as well")
        left_out = text_hashes(apart_from or ())
        stored = None
        if resume and has_entry(output_file, name):
            stored = Calibration.read(output_file, name)
            check_same_flags(stored, threshold, output_file)
        elif engine != "hf" and tau0 is None:
            raise ValueError(
                "tau_0 is found with --engine hf: do that first, without --search; then repeat the "
                "command with --search --resume and this engine. Or give it: --tau0"
            )
        texts = [] if stored or tau0 is not None else read_threshold_problems(threshold, left_out)
        plan = None
        if search:
            seen = stored.problems if stored else map(text_sha256, texts)
            plan = search_plan(flags, {*left_out, *seen}, resume=resume)

        source = engines.open_engine(choice)
        found = stored or find_or_take(threshold, texts, source, model)
        check_same_model(found, source, output_file)
        if not as_json:  # first: what took so long must not be lost to a full disk
            output().print(threshold_table(found))
        if not stored:
            found = replace(found, config={**found.config, **temperatures})
            found.write(output_file, name)
        if plan is not None:
            found = run_search(found, flags, plan, source, resume=resume)
            assert found.search is not None
            if not as_json:
                output().print(search_table(found.search["arms"]))
                output().print(found.recommendation, soft_wrap=True)
            found.write(output_file, name)
        if as_json:
            print(json.dumps(asdict(found), indent=2))
        _say_what_next(found, output_file, name)


def _checked_temperatures(
    t_low: float | None, t_high: float | None, search: bool
) -> dict[str, float]:
    """Those that are to be stored as given."""
    given = {"t_low": t_low, "t_high": t_high}
    chosen = {key: value for key, value in given.items() if value is not None}
    if chosen and search:
        raise ValueError("--search finds T_low and T_high; drop --t-low and --t-high")
    ReSETConfig(**{"t_low": 0.0, "tau_0": 0.0, **chosen})  # type: ignore[arg-type]
    return chosen


def _say_what_next(found: Calibration, file: Path, name: str | None) -> None:
    preset = str(file) if name is None else f"{file}:{name}"
    notes().print(f"written: {file}; use it as --preset {preset}")
    if found.search is not None and found.search["kind"] == "none":
        notes().print("neither T_low nor a fixed temperature is in it: none was shown better")
    elif found.search is None and "t_low" not in found.config:
        notes().print("T_low is not in it: find it with --search --resume, or pass --t-low")


def main() -> None:
    """Entry point of `reset-calibrate`."""
    app()


if __name__ == "__main__":
    main()
