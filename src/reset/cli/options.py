"""Options that several commands share: which policy, and how a text is sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from reset.config import ESTIMATORS, POLICIES, ReSETConfig

Model = Annotated[
    str, typer.Option(help="Model folder (NVFP4 checkpoint or any transformers model) or hub name.")
]
Device = Annotated[str, typer.Option(help="Torch device, e.g. cpu or cuda.")]
Dtype = Annotated[
    Literal["auto", "bfloat16", "float16", "float32"],
    typer.Option(help="auto: as the checkpoint says."),
]
Activations = Annotated[
    Literal["checkpoint", "none", "nvfp4"],
    typer.Option(help="NVFP4 checkpoints only: as it says, left in 16 bits, or quantised (W4A4)."),
]
TopP = Annotated[float, typer.Option(help="Nucleus, (0, 1]; applied after the temperature.")]
Seed = Annotated[
    int | None, typer.Option(help="Seed of the sampler; drawn and printed if left out.")
]
TLow = Annotated[
    float | None, typer.Option("--t-low", help="Temperature below the threshold. Per model.")
]
Tau0 = Annotated[
    float | None,
    typer.Option("--tau0", help="Global entropy threshold, nats. Per model (reset-calibrate)."),
]
THigh = Annotated[
    float | None,
    typer.Option(
        "--t-high", help="Temperature at or above the threshold; 1.0 unless a preset says more."
    ),
]
Window = Annotated[
    int | None, typer.Option(help="Entropies in the window mean, tokens; 32 by default.")
]
Policy = Annotated[str, typer.Option(help=f"One of {', '.join(POLICIES)}.")]
Estimator = Annotated[str, typer.Option(help=f"How H_step is estimated: {', '.join(ESTIMATORS)}.")]
BaseTemp = Annotated[float, typer.Option(help="Temperature of --policy fixed.")]
Preset = Annotated[
    str | None,
    typer.Option(help="A published preset (Qwen3-8B, ...) or a file made by reset-calibrate."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def checked_device(name: str) -> torch.device:
    """The torch device of `--device`; refuses what is not a CPU or a CUDA GPU that is there.

    Raises:
        ValueError: another kind of device, or a GPU that torch does not find.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device is {name!r}, need cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(
                f"--device is {name}, but torch finds {count} CUDA GPUs; nvfp4r doctor says why"
            )
    return device


def policy_config(
    *,
    preset: str | None,
    t_low: float | None,
    tau0: float | None,
    t_high: float | None,
    window: int | None,
    policy: str,
    estimator: str,
    base_temp: float,
) -> ReSETConfig:
    """The configuration that the flags describe; single flags override the preset.

    Raises:
        ValueError: a value is out of range, missing, or the preset does not exist.
    """
    values: dict[str, Any] = {"policy": policy, "estimator": estimator, "base_temp": base_temp}
    given = {"t_low": t_low, "tau_0": tau0, "t_high": t_high, "window": window}
    values |= {name: value for name, value in given.items() if value is not None}
    if preset is None:
        return ReSETConfig(**values)
    if Path(preset).is_file():
        return ReSETConfig.from_file(preset, **values)
    return ReSETConfig.preset(preset, **values)
