"""Options that several commands share: which policy, and how a text is sampled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
import typer

from reset.config import ESTIMATORS, POLICIES, ReSETConfig
from reset.presets import split_preset

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
Policy = Annotated[
    str | None,
    typer.Option(
        help=f"One of {', '.join(POLICIES)}; reset unless a file of reset-calibrate says fixed."
    ),
]
Estimator = Annotated[
    str | None, typer.Option(help=f"How H_step is estimated: {', '.join(ESTIMATORS)}.")
]
BaseTemp = Annotated[
    float | None,
    typer.Option(help="Temperature of --policy fixed; 0.6 unless a preset says more."),
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="A published preset (Qwen3-8B, ...), a file made by reset-calibrate, or FILE:NAME "
        "where it holds several."
    ),
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


def check_sampling(max_tokens: int, top_p: float, seed: int) -> None:
    """Refuses flags of the sampling before a model is loaded.

    Raises:
        ValueError: names the flag and its range.
    """
    if max_tokens < 1:
        raise ValueError(f"--max-tokens is {max_tokens}; it must be at least 1")
    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p is {top_p}; it must be above 0 and at most 1")
    if seed < 0:
        raise ValueError(f"--seed is {seed}; it must be at least 0")


def policy_config(
    *,
    preset: str | None,
    t_low: float | None,
    tau0: float | None,
    t_high: float | None,
    window: int | None,
    policy: str | None,
    estimator: str | None,
    base_temp: float | None,
) -> ReSETConfig:
    """The configuration that the flags describe; single flags (None: not given) override a preset.

    Raises:
        ValueError: a value is out of range, missing, or the preset does not exist.
    """
    given: dict[str, Any] = {
        **{"t_low": t_low, "tau_0": tau0, "t_high": t_high, "window": window},
        **{"policy": policy, "estimator": estimator, "base_temp": base_temp},
    }
    values = {name: value for name, value in given.items() if value is not None}
    return ReSETConfig(**values) if preset is None else preset_config(preset, **values)


def preset_config(preset: str, **values: Any) -> ReSETConfig:
    """The configuration of `--preset`: a file, FILE:NAME or a published one; `values` override it.

    Raises:
        ValueError, TypeError: as `ReSETConfig.from_file` and `ReSETConfig.preset`.
    """
    if place := split_preset(preset):
        return ReSETConfig.from_file(place[0], name=place[1], **values)
    return ReSETConfig.preset(preset, **values)
