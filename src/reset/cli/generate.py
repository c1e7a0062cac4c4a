"""`reset-generate`: one prompt, streamed, with the numbers behind every token on request."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from nvfp4r.console import error_boundary, notes, output
from reset.cli import options
from reset.cli.options import policy_config
from reset.files import check_file_target
from reset.trace.record import Trace

app = typer.Typer(add_completion=False)


@app.command()
def generate(
    model: options.Model,
    prompt: Annotated[str, typer.Option(help="The question; - reads it from standard input.")],
    engine: Annotated[str, typer.Option(help="hf (transformers) or vllm.")] = "hf",
    t_low: options.TLow = None,
    tau0: options.Tau0 = None,
    t_high: options.THigh = None,
    window: options.Window = None,
    policy: options.Policy = None,
    estimator: options.Estimator = None,
    base_temp: options.BaseTemp = None,
    preset: options.Preset = None,
    top_p: options.TopP = 0.95,
    seed: options.Seed = None,
    max_tokens: Annotated[int, typer.Option(help="Output limit, tokens.")] = 2048,
    system: Annotated[str | None, typer.Option(help="System prompt of the chat template.")] = None,
    chat: Annotated[bool, typer.Option(help="Wrap the prompt in the chat template.")] = True,
    device: Annotated[
        str | None, typer.Option(help="Torch device; cpu if left out, with vllm its own.")
    ] = None,
    dtype: options.Dtype = "auto",
    activations: options.Activations = "checkpoint",
    trace: Annotated[
        Path | None, typer.Option(help="Write a page that explains every token (.html).")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Write the entropy chart as a picture (.png).")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the trace as JSON instead of the text.")
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Answer a prompt with the step-aware temperature, streaming the text as it comes.

    Needs --preset, or --t-low and --tau0: both belong to the model. The baseline is
    --policy fixed --base-temp 0.6.
    """
    with error_boundary(debug):
        _check_engine(engine)
        config = policy_config(
            preset=preset,
            t_low=t_low,
            tau0=tau0,
            t_high=t_high,
            window=window,
            policy=policy,
            estimator=estimator,
            base_temp=base_temp,
        )
        if engine == "hf":
            device = device or "cpu"
        if device is not None:
            options.checked_device(device)
        for path in (trace, figure):
            if path is not None:
                check_file_target(path)
        question = sys.stdin.read() if prompt == "-" else prompt

        runner = _engine(engine)
        runner.check_sampling(max_tokens, top_p, seed)
        loaded = runner.load_engine(model, device=device, dtype=dtype, activations=activations)
        wrapped = runner.make_prompt(loaded, question, system=system, chat=chat)
        if not as_json:
            notes().print(f"[dim]{config}[/dim]")
        record = runner.generate(
            loaded,
            [wrapped],
            config,
            max_new_tokens=max_tokens,
            top_p=top_p,
            seed=seed,
            on_text=None if as_json else _print_piece,
        )[0]
        if as_json:
            print(record.to_json())
        else:
            output().print("\n")
            output().print(summary_table(record))
        _write(record, trace, figure)


def summary_table(record: Trace) -> Table:
    """Tokens, steps, share at T_high, mean entropy and speed of one text."""
    figures = record.summary()
    share = figures["share_t_high"]
    table = Table("tokens", "steps", "share at T_high", "mean entropy", "speed", "ended by", "seed")
    table.add_row(
        str(figures["tokens"]),
        str(figures["steps"]),
        "-" if share is None else f"{share:.0%}",
        f"{figures['mean_entropy_nats']:.3f} nats",
        f"{figures['tokens_per_second']:.1f} tokens/s",
        "the model" if record.finish_reason == "stop" else "--max-tokens",
        str(record.seed),
    )
    return table


def _print_piece(piece: str) -> None:
    print(piece, end="", flush=True)


def _check_engine(name: str) -> None:
    if name not in ("hf", "vllm"):
        raise ValueError(f"--engine is {name!r}; the engines are hf and vllm")


def _engine(name: str) -> Any:
    """The module of an engine. Imported late: it takes seconds, and bad flags need none of it."""
    if name == "vllm":
        from reset.vllm import engine as vllm_engine

        return vllm_engine
    from reset import engine as hf_engine

    return hf_engine


def _write(record: Trace, trace: Path | None, figure: Path | None) -> None:
    if trace is not None:
        from reset.trace.page import write_page

        write_page(record, trace)
        notes().print(f"trace page: {trace}")
    if figure is not None:
        from reset.trace.figure import write_figure

        write_figure(record, figure)
        notes().print(f"figure: {figure}")


def main() -> None:
    """Entry point of `reset-generate`."""
    app()


if __name__ == "__main__":
    main()
