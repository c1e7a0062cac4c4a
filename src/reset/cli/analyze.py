"""`reset-analyze`: per-token records of a model, and the studies that read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from nvfp4r.console import count_progress, error_boundary, notes, output
from reset.analyze.dump import Dump, open_with_answers
from reset.analyze.study import Row, Study, output_files
from reset.cli import options
from reset.cli.analyze_dump import at_least, dump
from reset.files import check_file_target, written_aside

app = typer.Typer(add_completion=False, no_args_is_help=True)
app.command()(dump)

DumpFolder = Annotated[Path, typer.Option("--dump", help="Folder that reset-analyze dump wrote.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        help="Prefix of the files: PREFIX.png, PREFIX.svg, PREFIX.json, PREFIX.TABLE.csv.",
    ),
]
# Columns that fit a terminal; the files have them all.
_PERCENTILES = (
    *("dump", "entropies", "tokens", "mean_nats"),
    *("p10_nats", "p50_nats", "p80_nats", "p95_nats", "p99_nats"),
)
_SHIFTS = (
    *("grouped_by", "group", "from_nats", "steps", "tokens", "reference_nats"),
    *("shift_nats", "shift_low_nats", "shift_high_nats", "inflated", "collapsed"),
)

AsJson = Annotated[bool, typer.Option("--json", help="Print the numbers as JSON, not as tables.")]


@app.callback()
def analyze() -> None:
    """Look at a model's token entropies: record them (dump), then study the records."""


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
        _check_output(output_prefix)
        from reset.analyze.distribution import distribution as study_distribution

        study = study_distribution(_opened(dumps), bin_width)
        _report(study, {"percentiles": _PERCENTILES, "positions": ()}, output_prefix, as_json)


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
        _check_output(output_prefix)
        from reset.analyze.steps import step_entropies

        study = step_entropies(_opened([folder])[0], tau0)
        _report(study, {"groups": ()}, output_prefix, as_json)


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
        _check_output(output_prefix)
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
        _report(study, {"groups": _SHIFTS}, output_prefix, as_json)


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
        _check_output(output_prefix)
        from reset.analyze.estimators import estimators as study_estimators

        study = study_estimators(_opened([folder])[0], window)
        _report(study, {"overall": (), "positions": ()}, output_prefix, as_json)


@app.command()
def perplexity(
    model: options.Model,
    data: Annotated[Path, typer.Option(help="Text file, e.g. the test part of WikiText-2.")],
    context: Annotated[int, typer.Option(help="Tokens a window.")] = 2048,
    stride: Annotated[
        int | None, typer.Option(help="Tokens from window to window; the context if left out.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Use the first so many tokens of the text only.")
    ] = None,
    output_file: Annotated[Path | None, typer.Option("--output", help="File (.json).")] = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    activations: options.Activations = "checkpoint",
    as_json: AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Perplexity of a text, windows of --context tokens every --stride tokens.

    The text is tokenised whole. A token is scored once, in the first window that holds it and one
    before it. With the stride left out windows do not overlap, as is usual for WikiText-2 (2048).
    """
    with error_boundary(debug):
        if output_file is not None:
            check_file_target(output_file)
        options.checked_device(device)
        from reset import engine as hf_engine
        from reset.analyze import perplexity as measure
        from reset.calibrate import folder_sha256, text_sha256

        stride = context if stride is None else stride
        list(measure.windows(2, context, stride))  # refuses what does not fit
        text = _read_text(data)
        engine = hf_engine.load_engine(model, device=device, dtype=dtype, activations=activations)
        ids = engine.tokenizer(text, verbose=False)["input_ids"]
        ids = ids[: at_least("--max-tokens", max_tokens, 2)]
        count = len(list(measure.windows(len(ids), context, stride)))
        with count_progress("scoring", count, "windows") as advance:
            result = measure.perplexity(
                engine.model, ids, context=context, stride=stride, advance=advance
            )
        content = {
            **asdict(result),
            "context": context,
            "stride": stride,
            "text_tokens": len(ids),
            "data": str(data),
            "data_sha256": text_sha256(text),
            "model": model,
            "model_sha256": folder_sha256(engine.folder),
            "quantisation": engine.quantisation,
            "dtype": str(engine.model.dtype).removeprefix("torch."),
            "versions": hf_engine.package_versions(),
        }
        if as_json:
            print(json.dumps(content, indent=2))
        else:
            shown = ("perplexity", "mean_nll_nats", "tokens", "windows", "context", "stride")
            _print_rows("", [{name: content[name] for name in shown}])
        if output_file is not None:
            with written_aside(output_file) as partial:
                partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            notes().print(f"written: {output_file}")


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text ({error}); convert it") from error
    if not text.strip():
        raise ValueError(f"{path}: holds no text")
    return text


def _check_output(prefix: Path | None) -> None:
    """Refuses what cannot be written before the work is done."""
    if prefix is not None:
        from reset.analyze.figures import check_matplotlib

        check_matplotlib()
        output_files(prefix)


def _opened(folders: Sequence[Path]) -> list[Dump]:
    dumps = open_with_answers(folders)
    for one in dumps:
        if (done := len(one.done())) < one.total:
            notes().print(f"{one.folder}: {done} of {one.total} answers, not yet complete")
    return dumps


def _report(
    study: Study, tables: Mapping[str, Sequence[str]], prefix: Path | None, as_json: bool
) -> None:
    """Print and write a study; `tables`: which of them to print, and which columns (all if ())."""
    if as_json:
        print(study.to_json(), end="")
    else:
        for name, columns in tables.items():
            rows = study.tables[name]
            _print_rows(name, [{key: row[key] for key in columns or row} for row in rows])
        _print_rows("summary", [study.summary])
    if prefix is not None:
        from reset.analyze.figures import write_figures

        for path in [*study.write(prefix), *write_figures(study, prefix)]:
            notes().print(f"written: {path}")


def _print_rows(title: str, rows: Sequence[Row]) -> None:
    table = Table(*(name.replace("_", " ") for name in rows[0]), title=title or None)
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    output().print(table)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(_shown(one) for one in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Entry point of `reset-analyze`."""
    app()


if __name__ == "__main__":
    main()
