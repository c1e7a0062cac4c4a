"""`reset-analyze dump`: record what a model thinks of every token of its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nvfp4r.console import count_progress, error_boundary, notes
from reset.cli import options
from reset.config import ReSETConfig
from reset.texts import read_problems

DEFAULT_PROBLEMS = 5
DEFAULT_MAX_TOKENS = 8192


def dump(
    model: options.Model,
    output_folder: Annotated[
        Path, typer.Option("--output", help="Folder; one with the same settings is continued.")
    ],
    data: Annotated[
        str | None,
        typer.Option(help="Problems to decode: .jsonl or .txt file, or hub data set."),
    ] = None,
    forced: Annotated[
        str | None,
        typer.Option(help="Instead of decoding, score these: a dump, or texts as for --data."),
    ] = None,
    num_problems: Annotated[
        int | None,
        typer.Option(help="How many; 5 if left out, all if --forced is a dump."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of each answer; 8192 if left out, all with --forced."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="If left out: reset where a flag of it is given, otherwise fixed."),
    ] = None,
    t_low: options.TLow = None,
    tau0: options.Tau0 = None,
    t_high: options.THigh = None,
    window: options.Window = None,
    estimator: Annotated[
        str | None, typer.Option(help="How H_step is estimated; hybrid if left out.")
    ] = None,
    base_temp: Annotated[
        float | None, typer.Option(help="Temperature of --policy fixed; 0.6 if left out.")
    ] = None,
    preset: options.Preset = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus, (0, 1]; 0.95 if left out.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the first batch, later ones add 1; 0 if left out.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Problems decoded at once; 1 if left out. What a kill can cost."),
    ] = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    activations: options.Activations = "checkpoint",
    debug: options.Debug = False,
) -> None:
    """Record entropy, log-probability and rank of every token of a model's answers.

    With --data the model decodes problems, at a fixed temperature of 0.6 unless a policy is given.
    With --forced it scores given sequences: a dump of its unquantised form, for reset-analyze
    shift, or texts. Run the same command again to go on after an interruption.
    """
    with error_boundary(debug):
        if (data is None) == (forced is None):
            raise ValueError("give either --data (problems to decode) or --forced (texts to score)")
        if output_folder.exists() and not output_folder.is_dir():
            raise ValueError(f"{output_folder}: is a file; --output needs a folder")
        options.checked_device(device)
        at_least("--max-tokens", max_tokens, 1)
        at_least("--num-problems", num_problems, 1)
        sampling_flags = {
            "--policy": policy,
            "--t-low": t_low,
            "--tau0": tau0,
            "--t-high": t_high,
            "--window": window,
            "--estimator": estimator,
            "--base-temp": base_temp,
            "--preset": preset,
            "--top-p": top_p,
            "--seed": seed,
            "--batch-size": batch_size,
        }
        loading: dict[str, Any] = {"device": device, "dtype": dtype, "activations": activations}
        if forced is not None:
            _refuse_with_forced(sampling_flags)
            _score(model, output_folder, forced, num_problems, max_tokens, loading)
            return
        assert data is not None
        of_reset = (preset, t_low, tau0, t_high, window, estimator)
        is_plain = all(value is None for value in of_reset)
        config = options.policy_config(
            preset=preset,
            t_low=t_low,
            tau0=tau0,
            t_high=t_high,
            window=window,
            policy=policy or ("fixed" if is_plain else None),
            estimator=estimator,
            base_temp=base_temp,
        )
        _decode(
            model,
            output_folder,
            data,
            read_problems(data, num_problems or DEFAULT_PROBLEMS),
            config,
            loading,
            max_tokens=max_tokens or DEFAULT_MAX_TOKENS,
            top_p=0.95 if top_p is None else top_p,
            seed=seed or 0,
            batch_size=1 if batch_size is None else batch_size,
        )


def at_least(flag: str, value: int | None, least: int) -> int | None:
    """`value`, refused if it is below `least`; None stays None.

    Raises:
        ValueError: names the flag.
    """
    if value is not None and value < least:
        raise ValueError(f"{flag} is {value}; it must be at least {least}")
    return value


def _refuse_with_forced(flags: dict[str, Any]) -> None:
    given = [name for name, value in flags.items() if value is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)}: nothing is sampled with --forced; leave it out, or use --data"
        )


def _decode(
    model: str,
    folder: Path,
    data: str,
    problems: list[str],
    config: ReSETConfig,
    loading: dict[str, Any],
    **sampling: Any,
) -> None:
    from reset import engine as hf_engine
    from reset.analyze.collect import Sampling, dump_answers

    chosen = Sampling(config, **sampling)
    hf_engine.check_sampling(chosen.max_tokens, chosen.top_p, chosen.seed)
    engine = hf_engine.load_engine(model, **loading)
    notes().print(f"[dim]{config}[/dim]")
    with count_progress("decoding", len(problems), "problems") as advance:
        dump_answers(engine, folder, problems, chosen, data=data, advance=advance)
    notes().print(f"written: {folder}")


def _score(
    model: str,
    folder: Path,
    forced: str,
    count: int | None,
    max_tokens: int | None,
    loading: dict[str, Any],
) -> None:
    from reset import engine as hf_engine
    from reset.analyze.collect import (
        dump_given,
        is_dump,
        sequences_of_dump,
        sequences_of_texts,
    )

    if not is_dump(forced) and Path(forced).is_dir():
        raise ValueError(f"{forced}: is a folder, but no dump")
    engine = hf_engine.load_engine(model, **loading)
    if is_dump(forced):
        given = sequences_of_dump(engine, Path(forced), count)
    else:
        given = sequences_of_texts(engine, forced, count or DEFAULT_PROBLEMS)
    with count_progress("scoring", len(given.names), "sequences") as advance:
        dump_given(engine, folder, given, max_tokens, advance=advance)
    notes().print(f"written: {folder}")
