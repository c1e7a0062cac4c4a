"""`reset-calibrate`: find tau_0 of a model from its own entropies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from nvfp4r.console import count_progress, error_boundary, notes, output
from reset.calibrate import (
    DEFAULT_PERCENTILE,
    Calibration,
    folder_sha256,
    percentile_threshold,
    text_sha256,
)
from reset.cli import options
from reset.config import ReSETConfig
from reset.files import check_file_target
from reset.texts import read_problems

app = typer.Typer(add_completion=False)


@app.command()
def calibrate(
    model: options.Model,
    output_file: Annotated[Path, typer.Option("--output", help="File to write (.json).")],
    data: Annotated[
        str,
        typer.Option(help=".jsonl or .txt file, or hub data set, of problems that no test uses."),
    ] = "AI-MO/NuminaMath-1.5",
    num_problems: Annotated[int, typer.Option(help="Problems to decode.")] = 5,
    percentile: Annotated[float, typer.Option(help="0 .. 100.")] = DEFAULT_PERCENTILE,
    temperature: Annotated[float, typer.Option(help="Fixed temperature of the decoding.")] = 0.6,
    top_p: options.TopP = 0.95,
    max_tokens: Annotated[int, typer.Option(help="Output limit of each problem.")] = 8192,
    batch_size: Annotated[int, typer.Option(help="Problems decoded at once.")] = 8,
    t_low: options.TLow = None,
    t_high: options.THigh = None,
    seed: Annotated[int, typer.Option(help="Seed of the first batch; later ones add 1.")] = 0,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    activations: options.Activations = "checkpoint",
    debug: options.Debug = False,
) -> None:
    """Find tau_0: the 80th percentile of raw-logit token entropy over a few held-out problems.

    The model that will be served must decode them itself: the NVFP4 one, not its BF16 source.
    --t-low and --t-high are stored as given; this release does not search for them.
    """
    with error_boundary(debug):
        check_file_target(output_file)
        options.checked_device(device)
        if batch_size < 1:
            raise ValueError(f"--batch-size is {batch_size}; it must be at least 1")
        chosen: dict[str, Any] = {"t_low": t_low, "t_high": t_high}
        temperatures = {name: value for name, value in chosen.items() if value is not None}
        ReSETConfig(**{"t_low": 0.0, "tau_0": 0.0, **temperatures})  # checks the ranges
        baseline = ReSETConfig(policy="fixed", base_temp=temperature)
        percentile_threshold([[0.0]], percentile)
        problems = read_problems(data, num_problems)

        from reset import engine as hf_engine

        hf_engine.check_sampling(max_tokens, top_p, seed)
        engine = hf_engine.load_engine(model, device=device, dtype=dtype, activations=activations)
        prompts = [hf_engine.make_prompt(engine, problem) for problem in problems]
        traces = []
        with count_progress("decoding", len(prompts), "problems") as advance:
            for start in range(0, len(prompts), batch_size):
                traces += hf_engine.generate(
                    engine,
                    prompts[start : start + batch_size],
                    baseline,
                    max_new_tokens=max_tokens,
                    top_p=top_p,
                    seed=seed + start // batch_size,
                    alternatives=0,
                )
                advance(len(traces))
        entropies = [[token.entropy_nats for token in trace.tokens] for trace in traces]
        tau_0 = percentile_threshold(entropies, percentile)
        calibration = Calibration(
            config={"tau_0": tau_0, **temperatures},
            percentile=percentile,
            model=model,
            model_sha256=folder_sha256(engine.folder),
            quantisation=engine.quantisation,
            data=data,
            problems=[text_sha256(problem) for problem in problems],
            tokens=[len(tokens) for tokens in entropies],
            truncated=sum(trace.finish_reason == "length" for trace in traces),
            sampling={
                "temperature": temperature,
                "top_p": top_p,
                "seed": seed,
                "batch_size": batch_size,
                "max_tokens": max_tokens,
            },
            versions=traces[0].versions,
        )
        _report(calibration)  # first: what took so long must not be lost to a full disk
        calibration.write(output_file)
        notes().print(f"written: {output_file}; use it as --preset {output_file}")
        if "t_low" not in calibration.config:
            notes().print("T_low is not in it: pass --t-low to reset-generate as well")


def _report(calibration: Calibration) -> None:
    table = Table("tau_0", "percentile", "problems", "tokens", "truncated")
    table.add_row(
        f"{calibration.config['tau_0']:.4f} nats",
        f"{calibration.percentile:g}",
        str(len(calibration.problems)),
        str(sum(calibration.tokens)),
        str(calibration.truncated),
    )
    output().print(table)


def main() -> None:
    """Entry point of `reset-calibrate`."""
    app()


if __name__ == "__main__":
    main()
