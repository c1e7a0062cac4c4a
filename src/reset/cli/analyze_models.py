"""`reset-analyze perplexity` and `weights`: models and checkpoints held against each other."""

from __future__ import annotations

import gc
import json
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from nvfp4r.console import count_progress, error_boundary, notes
from reset.cli import options
from reset.cli.analyze_dump import at_least
from reset.cli.analyze_report import AsJson, Output, check_output, print_rows, report
from reset.files import check_file_target, written_aside
from reset.hub import model_folder

_SHOWN = ("model", "method", "format", "perplexity", "change", "mean_nll_nats", "tokens", "windows")
_WEIGHT_COLUMNS = (
    *("kind", "method", "layers", "median_error", "median_snr_db", "worst_error"),
    *("saturated", "subnormal_scales", "zero_codes"),
)


class Activations(str, Enum):
    CHECKPOINT = "checkpoint"
    NONE = "none"
    NVFP4 = "nvfp4"


def perplexity(
    models: Annotated[
        list[str],
        typer.Option(
            "--model", help="Folder or hub name of a model; give several for one table of them."
        ),
    ],
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
    activations: Annotated[
        list[Activations] | None,
        typer.Option(
            help="NVFP4 checkpoints only: as it says, left in 16 bits, or quantised (W4A4). Give "
            "several to run each checkpoint in several ways; checkpoint if left out."
        ),
    ] = None,
    as_json: AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Perplexity of a text under one or several models, in one table.

    The text is tokenised whole. A token is scored once, in the first window of --context tokens
    that holds it and one before it. With the stride left out windows do not overlap, as is usual
    for WikiText-2 (2048). Models are loaded one after the other.
    """
    with error_boundary(debug):
        if output_file is not None:
            check_file_target(output_file)
        options.checked_device(device)
        at_least("--max-tokens", max_tokens, 2)
        from reset import engine as hf_engine
        from reset.analyze import perplexity as measure
        from reset.calibrate import text_sha256

        stride = context if stride is None else stride
        list(measure.windows(2, context, stride))  # refuses what does not fit
        text = _read_text(data)
        runs = _runs(models, activations or [Activations.CHECKPOINT])
        rows: list[dict[str, Any]] = []
        for number, (name, ways) in enumerate(runs, start=1):
            row = _measured(name, ways, number, len(runs), text, max_tokens, context, stride,
                            device=device, dtype=dtype)  # fmt: skip
            row["change"] = row["perplexity"] / rows[0]["perplexity"] - 1 if rows else None
            rows.append(row)
            gc.collect()  # a model's parts refer to each other; the next one needs the memory
        if len({row["token_sha256"] for row in rows}) > 1:
            notes().print(
                "[yellow]note:[/yellow] the models cut the text into different tokens; their "
                "perplexities cannot be compared"
            )
        content = {
            "protocol": {
                "context": context,
                "stride": stride,
                "max_tokens": max_tokens,
                "data": str(data),
                "data_sha256": text_sha256(text),
            },
            "models": rows,
            "versions": hf_engine.package_versions(),
        }
        if as_json:
            print(json.dumps(content, indent=2))
        else:
            title = f"{data.name}, context {context}, stride {stride}"
            print_rows(title, [{name: row[name] for name in _SHOWN} for row in rows])
        if output_file is not None:
            with written_aside(output_file) as partial:
                partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            notes().print(f"written: {output_file}")


def _runs(models: list[str], activations: list[Activations]) -> list[tuple[str, Activations]]:
    """What to load and how: every NVFP4 checkpoint in all ways, other models once.

    Raises:
        ValueError: a model or a way is given twice; there is no NVFP4 checkpoint to apply the
            ways to; W4A4 is asked of a checkpoint without input scales. Names them.
    """
    from nvfp4r.checkpoint.dialects import read_config
    from reset.engine import is_nvfp4

    for flag, values in (("--model", models), ("--activations", [a.value for a in activations])):
        twice = [value for value in values if values.count(value) > 1]
        if twice:
            raise ValueError(f"{flag} {twice[0]} is given twice; leave one out")
    runs: list[tuple[str, Activations]] = []
    quantised = {name: is_nvfp4(model_folder(name)) for name in models}
    if not any(quantised.values()) and activations != [Activations.CHECKPOINT]:
        raise ValueError(
            f"none of {', '.join(models)} is an NVFP4 checkpoint, so --activations has no meaning; "
            "leave it out, or make one with reset-quantize"
        )
    for name, is_quantised in quantised.items():
        if is_quantised:
            own = read_config(model_folder(name)).activations
            if own == "none" and Activations.NVFP4 in activations:
                raise ValueError(
                    f"{name}: its activations are not quantised and it has no input scales, but "
                    "--activations nvfp4 needs them; make it with reset-quantize --activations "
                    "nvfp4 --calib-data, which --activations none then reads as W4A16"
                )
        ways: list[Activations] = activations if is_quantised else [Activations.CHECKPOINT]
        runs += [(name, way) for way in ways]
    return runs


def _measured(
    name: str,
    activations: Activations,
    number: int,
    count: int,
    text: str,
    max_tokens: int | None,
    context: int,
    stride: int,
    *,
    device: str,
    dtype: Any,
) -> dict[str, Any]:
    """Loads one model and scores the text."""
    from reset import engine as hf_engine
    from reset.analyze import perplexity as measure
    from reset.analyze.weights import method_of
    from reset.calibrate import folder_sha256, text_sha256

    engine = hf_engine.load_engine(name, device=device, dtype=dtype, activations=activations.value)
    ids = engine.tokenizer(text, verbose=False)["input_ids"][:max_tokens]
    windows = len(list(measure.windows(len(ids), context, stride)))
    title = "scoring" if count == 1 else f"{number}/{count}"
    with count_progress(title, windows, "windows") as advance:
        result = measure.perplexity(
            engine.model, ids, context=context, stride=stride, advance=advance
        )
    own_dtype = str(engine.model.dtype).removeprefix("torch.")
    is_plain = engine.quantisation["format"] == "none"
    return {
        "model": name,
        "method": None if is_plain else method_of(engine.folder),
        "format": own_dtype if is_plain else _format(engine.model),
        **asdict(result),
        "text_tokens": len(ids),
        "token_sha256": text_sha256(" ".join(map(str, ids))),
        "model_sha256": folder_sha256(engine.folder),
        "quantisation": engine.quantisation,
        "dtype": own_dtype,
    }


def _format(model: Any) -> str:
    """W4A4 if the layers of a loaded NVFP4 model quantise their inputs, else W4A16."""
    from nvfp4r import NVFP4Linear

    layers = [module for module in model.modules() if isinstance(module, NVFP4Linear)]
    return "W4A4" if any(layer.activations == "nvfp4" for layer in layers) else "W4A16"


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text ({error}); convert it") from error
    if not text.strip():
        raise ValueError(f"{path}: holds no text")
    return text


def weights(
    source: Annotated[
        str, typer.Option(help="Unquantised model that the checkpoints were made of.")
    ],
    models: Annotated[
        list[str], typer.Option("--model", help="NVFP4 checkpoint; give several to compare them.")
    ],
    output_prefix: Output = None,
    as_json: AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Error of quantised weights against their source, layer by layer, for several checkpoints.

    Median and worst layer of every kind; --json and --output have every layer. Rotated checkpoints
    are compared in the rotated basis, which leaves the error as it is.
    """
    with error_boundary(debug):
        check_output(output_prefix)
        from reset.analyze import weights as study

        folders = {name: model_folder(name) for name in models}
        if len(folders) < len(models):
            raise ValueError("--model names a checkpoint twice; leave one out")
        candidates = study.open_candidates(folders)
        source_folder = model_folder(source)
        tensors = study.open_source(source_folder)
        layers = study.common_layers(tensors, candidates)
        provenance = [
            study.provenance_of(source, source_folder),
            *(study.provenance_of(c.name, folders[c.name], c) for c in candidates),
        ]
        with count_progress("comparing", len(layers), "layers") as advance:
            result = study.compare_weights(
                tensors, candidates, layers, provenance=provenance, advance=advance
            )
        report(result, {"methods": _WEIGHT_COLUMNS}, output_prefix, as_json)
