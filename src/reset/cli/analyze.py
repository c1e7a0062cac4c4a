"""`reset-analyze`: per-token records of a model, their studies, and comparisons of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from nvfp4r.console import error_boundary, notes
from reset.analyze.dump import Dump, open_with_answers
from reset.cli import options
from reset.cli.analyze_dump import dump
from reset.cli.analyze_models import perplexity, weights
from reset.cli.analyze_report import AsJson, Output, check_output, report

app = typer.Typer(add_completion=False, no_args_is_help=True)
app.command()(dump)

DumpFolder = Annotated[Path, typer.Option("--dump", help="Folder that reset-analyze dump wrote.")]
# Columns that fit a terminal; the files have them all.
_PERCENTILES = (
    *("dump", "entropies", "tokens", "mean_nats"),
    *("p10_nats", "p50_nats", "p80_nats", "p95_nats", "p99_nats"),
)
_SHIFTS = (
    *("grouped_by", "group", "from_nats", "steps", "tokens", "reference_nats"),
    *("shift_nats", "shift_low_nats", "shift_high_nats", "inflated", "collapsed"),
)


@app.callback()
def analyze() -> None:
    """Look at token entropies: record them (dump), then study the records. Compare models."""


@app.command()
def distribution(
    dumps: Annotated[
        list[Path], typer.Option("--dump", help="Folder of a dump; give several to compare them.")
    ],
    bin_width: Annotated[float, typer.Option(help="Of the histogram, nats.")] = 0.1,
    output_prefix: Output = None,
    as_json: AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Histogram and percentiles of token entropy, and its course over the output position."""
    with error_boundary(debug):
        check_output(output_prefix)
        from reset.analyze.distribution import distribution as study_distribution

        study = study_distribution(_opened(dumps), bin_width)
        report(study, {"percentiles": _PERCENTILES, "positions": ()}, output_prefix, as_json)


@app.command()
def steps(
    folder: DumpFolder,
    tau0: Annotated[
        float | None, typer.Option("--tau0", help="Threshold to hold against them, nats.")
    ] = None,
    output_prefix: Output = None,
    as_json: AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Token entropy against the mean entropy of the token's step."""
    with error_boundary(debug):
        check_output(output_prefix)
        from reset.analyze.steps import step_entropies

        study = step_entropies(_opened([folder])[0], tau0)
        report(study, {"groups": ()}, output_prefix, as_json)


@app.command()
def shift(
    reference: Annotated[Path, typer.Option(help="Dump of the model as it was.")],
    quantised: Annotated[Path, typer.Option(help="Dump of the quantised model, same sequences.")],
    low_percentile: Annotated[float, typer.Option(help="Below it a token is low.")] = 50.0,
    high_percentile: Annotated[float, typer.Option(help="From it on it is very high.")] = 95.0,
    margin: Annotated[
        float, typer.Option(help="Change that counts as inflated or collapsed, nats.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    output_prefix: Output = None,
    as_json: AsJson = False,
    debug: options.Debug = False,
) -> None:
    """What quantisation does to low- and very-high-entropy tokens, by step uncertainty."""
    with error_boundary(debug):
        check_output(output_prefix)
        from reset.analyze.shift import shift as study_shift

        old, new = _opened([reference, quantised])
        study = study_shift(
            old,
            new,
            low_percentile=low_percentile,
            high_percentile=high_percentile,
            margin_nats=margin,
            seed=seed,
        )
        report(study, {"groups": _SHIFTS}, output_prefix, as_json)


@app.command()
def estimators(
    folder: DumpFolder,
    window: Annotated[int, typer.Option(help="w of the estimators, tokens.")] = 32,
    output_prefix: Output = None,
    as_json: AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Error of window, causal, ema and hybrid against the mean of the whole step."""
    with error_boundary(debug):
        check_output(output_prefix)
        from reset.analyze.estimators import estimators as study_estimators

        study = study_estimators(_opened([folder])[0], window)
        report(study, {"overall": (), "positions": ()}, output_prefix, as_json)


app.command()(perplexity)
app.command()(weights)


def _opened(folders: Sequence[Path]) -> list[Dump]:
    dumps = open_with_answers(folders)
    for one in dumps:
        if (done := len(one.done())) < one.total:
            notes().print(f"{one.folder}: {done} of {one.total} answers, not yet complete")
    return dumps


def main() -> None:
    """Entry point of `reset-analyze`."""
    app()


if __name__ == "__main__":
    main()
