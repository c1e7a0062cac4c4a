"""`reset-quantize`: a Hugging Face model in, an NVFP4 checkpoint out."""

from __future__ import annotations

import json
import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from nvfp4r.atomic import check_target, require_space
from nvfp4r.checkpoint.dialects import CONFIG_FILE
from nvfp4r.console import error_boundary, notes, tensor_progress
from nvfp4r.convert import check_dialect, convert, weight_maxima
from nvfp4r.methods import METHODS, Method, check_method, gptq
from nvfp4r.selection import ConversionPlan, plan_conversion
from reset.cli import options
from reset.cli.quantize_report import print_plan, print_summary, summary_of
from reset.hub import model_folder

DEFAULT_SAMPLES = 128
DEFAULT_TOKENS = 2048
_METHOD_HELP = "; ".join(f"{method.name}: {method.summary}" for method in METHODS.values()) + "."

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
    method: Annotated[str, typer.Option(help=_METHOD_HELP)] = "rtn",
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
            help="For W4A4 and calibrated methods: .txt (texts between blank lines), .jsonl (text, "
            "or question/problem and answer/solution), or a hub data set NAME[:CONFIG[:SPLIT]]."
        ),
    ] = None,
    calib_samples: Annotated[
        int, typer.Option(help="Calibration texts to run, at most.", min=1)
    ] = DEFAULT_SAMPLES,
    calib_tokens: Annotated[
        int, typer.Option(help="Tokens of each text, at most.", min=1)
    ] = DEFAULT_TOKENS,
    headroom: Annotated[
        float, typer.Option(help="W4A4: factor >= 1 on the largest activation seen.")
    ] = 1.0,
    damping: Annotated[
        float | None,
        typer.Option(
            help=f"{', '.join(gptq.METHODS)}: added to the Hessian's diagonal, as a share of its "
            f"mean; {gptq.DAMPING} by default."
        ),
    ] = None,
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
    Weights alone need about the memory of one output file (4 GB at most) and of the largest layers.
    gptq, mr-gptq and W4A4 hold the embeddings and one decoder layer; what texts look like between
    layers is held in memory up to 1 GiB, the rest on the disk of OUTPUT. gptq and mr-gptq keep
    finished layers in OUTPUT.work until the checkpoint is whole, and the same command goes on after
    them. awq loads the whole model. On a CPU models run in float32.
    """
    start = time.monotonic()
    with error_boundary(debug):
        chosen = check_method(method)
        check_dialect(chosen, dialect.value)
        _check_flags(chosen, activations, calib_data, headroom, damping)
        target = options.checked_device(device)
        # Imported late: transformers takes seconds, and the checks above need none of it.
        from reset.cli.source_model import check_linear_layers

        source = model_folder(model)
        check_target(output_folder, marker=CONFIG_FILE, force=force, source=source)
        plan = plan_conversion(source, exclude or [], quantise_head=quantize_lm_head)
        unchecked = check_linear_layers(plan)
        calibration = None
        if calib_data is not None:
            from reset.cli import quantize_calibrated as calibrated

            why_whole = calibrated.check_method_fits(plan, chosen)
            calibration = calibrated.Calibration.begin(
                plan,
                chosen,
                calibrated.calibration_rows(plan, calib_data, calib_samples, calib_tokens, chosen),
                target,
                output=output_folder,
                activations=activations.value,
                damping=damping,
                why_whole=why_whole,
            )
            calibration.require_room(_layers_bytes(plan, chosen))
        require_space(output_folder, plan.output_bytes + _layers_bytes(plan, chosen))
        if not as_json:
            print_plan(plan)
        if unchecked:
            notes().print(f"[yellow]note:[/yellow] {escape(unchecked)}", soft_wrap=True)

        with tensor_progress("checking") as advance:
            maxima = weight_maxima(plan, method=method, device=target, progress=advance)
        stored, input_amax = None, None
        if calibration is not None:
            stored, input_amax = calibration.run(maxima)
        with tensor_progress("quantising" if stored is None else "writing") as advance:
            report = convert(
                plan,
                output_folder,
                maxima,
                method=method,
                stored=stored,
                dialect=dialect.value,
                activations=activations.value,
                input_amax=input_amax,
                headroom=headroom,
                device=target,
                force=force,
                progress=advance,
            )
        facts = None
        if calibration is not None and calib_data is not None:
            facts = calibration.report(calib_data)
            calibration.finish()
        seconds = time.monotonic() - start
        summary = summary_of(plan, report, method=method, seconds=seconds, calibration=facts)
        if as_json:
            print(json.dumps(summary, indent=2))
        else:
            print_summary(summary)


def _check_flags(
    method: Method,
    activations: Activations,
    calib_data: str | None,
    headroom: float,
    damping: float | None,
) -> None:
    if calib_data is None:
        if method.calibrated:
            raise ValueError(
                f"--method {method.name} runs the model over texts, whatever the activations: give "
                "some with --calib-data FILE.txt, FILE.jsonl or a hub data set"
            )
        if activations is Activations.NVFP4:
            raise ValueError(
                "--activations nvfp4 needs input scales, which come from running the model over "
                "texts: give some with --calib-data FILE.txt, FILE.jsonl or a hub data set"
            )
    elif activations is Activations.NONE and not method.calibrated:
        calibrated = ", ".join(name for name, other in METHODS.items() if other.calibrated)
        raise ValueError(
            f"--calib-data is for quantised activations, but --activations is none and --method "
            f"{method.name} uses no texts; add --activations nvfp4, choose one of {calibrated}, or "
            "leave --calib-data out"
        )
    if activations is Activations.NVFP4:
        if not 1.0 <= headroom < float("inf"):
            raise ValueError(f"--headroom is {headroom}, need a finite factor >= 1")
    elif headroom != 1:
        raise ValueError(
            "--headroom is for quantised activations, but --activations is none; add "
            "--activations nvfp4, or leave --headroom out"
        )
    if damping is not None:
        if method.name not in gptq.METHODS:
            raise ValueError(
                f"--damping is for {' and '.join(gptq.METHODS)}, but --method is {method.name}; "
                "leave it out"
            )
        if not 0 < damping <= 1:
            raise ValueError(f"--damping is {damping}, need a share within (0, 1]")


def _layers_bytes(plan: ConversionPlan, method: Method) -> int:
    """Of finished layers that are kept beside the output until it is whole."""
    if method.name not in gptq.METHODS:
        return 0
    return plan.output_bytes - sum(plan.tensors.infos[name].nbytes for name in plan.kept)


def main() -> None:
    """Entry point of `reset-quantize`."""
    app()


if __name__ == "__main__":
    main()
