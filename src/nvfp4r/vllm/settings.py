"""What the plug-in is told to do: on or off, and its knobs.

The settings live in environment variables, because vLLM runs a model in processes of its own, which
inherit nothing else; `nvfp4r.enable` and `nvfp4r.configure` write them. A model takes them when it
is built, and keeps them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from nvfp4r.dialects import Activations
from nvfp4r.plan import MAX_KERNEL_M

ActivationSetting = Literal["auto", "nvfp4", "none"]

ENABLED = "NVFP4R"
GEMV_MAX_M = "NVFP4R_GEMV_MAX_M"
ACTIVATIONS = "NVFP4R_ACTIVATIONS"


@dataclass(frozen=True)
class Settings:
    """Validated settings.

    Attributes:
        enabled: whether models that are built from now on use this project's linear layers.
        gemv_max_m: largest number of tokens M that the small-batch kernels serve, 0 .. 192. Above
            it, and always with 0, a dense product on unpacked rows does it.
        activations: of W4A4 checkpoints: "nvfp4" rounds them to 4 bits as the checkpoint says,
            "none" leaves them in 16 bits, "auto" rounds them where the GPU has FP4 units.

    Raises:
        TypeError: a value of a wrong type.
        ValueError: a value out of range; names it.
    """

    enabled: bool = False
    gemv_max_m: int = MAX_KERNEL_M
    activations: ActivationSetting = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.gemv_max_m, bool) or not isinstance(self.gemv_max_m, int):
            raise TypeError(
                f"gemv_max_m is {self.gemv_max_m!r}, need an int from 0 to {MAX_KERNEL_M}"
            )
        if not 0 <= self.gemv_max_m <= MAX_KERNEL_M:
            raise ValueError(
                f"gemv_max_m is {self.gemv_max_m}, need 0 (never) to {MAX_KERNEL_M}, the largest "
                "number of tokens that the kernels take"
            )
        if self.activations not in get_args(ActivationSetting):
            raise ValueError(
                f"activations is {self.activations!r}, need one of "
                f"{', '.join(get_args(ActivationSetting))}"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """The settings that environment variables hold; os.environ by default.

        Raises:
            ValueError: a variable holds something else than it may; names it.
        """
        environment = os.environ if environment is None else environment
        enabled = environment.get(ENABLED, "0")
        if enabled not in ("0", "1"):
            raise ValueError(f"{ENABLED} is {enabled!r} in the environment, need 1 (on) or 0 (off)")
        limit = environment.get(GEMV_MAX_M, str(MAX_KERNEL_M))
        if not (limit.isascii() and limit.isdigit()):
            raise ValueError(
                f"{GEMV_MAX_M} is {limit!r} in the environment, need an integer from 0 to "
                f"{MAX_KERNEL_M}"
            )
        activations = environment.get(ACTIVATIONS, "auto")
        try:
            return cls(enabled == "1", int(limit), activations)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(
                f"{GEMV_MAX_M}={limit}, {ACTIVATIONS}={activations} in the environment: {error}"
            ) from None

    def environment(self) -> dict[str, str]:
        """The variables that hold these settings."""
        return {
            ENABLED: "1" if self.enabled else "0",
            GEMV_MAX_M: str(self.gemv_max_m),
            ACTIVATIONS: self.activations,
        }


def change(**values: object) -> Settings:
    """Writes new values into os.environ, where workers that start later find them.

    Raises:
        TypeError, ValueError: see `Settings`; nothing is changed then.
    """
    settings = replace(Settings.from_environment(), **values)  # type: ignore[arg-type]
    os.environ.update(settings.environment())
    return settings


def resolve_activations(
    stored: Activations, setting: ActivationSetting, has_fp4_units: bool, device: str
) -> tuple[Activations, str]:
    """How activations enter a layer, and why.

    Args:
        stored: what the checkpoint says.
        setting: `Settings.activations`.
        has_fp4_units: of the GPU.
        device: what the reason calls the GPU or CPU.

    Raises:
        ValueError: 4-bit activations are wanted, but the checkpoint holds no scales for them.
    """
    if stored == "none":
        if setting == "nvfp4":
            raise ValueError(
                f"activations='nvfp4' ({ACTIVATIONS}) needs input scales, but the checkpoint is "
                "W4A16 and holds none; use 'auto' or 'none', or quantise the model with "
                "reset-quantize --activations nvfp4"
            )
        return "none", "the checkpoint is W4A16: weights alone are quantised"
    if setting != "auto":
        return setting, f"activations={setting!r} was asked for"
    if has_fp4_units:
        return "nvfp4", f"the checkpoint is W4A4, and {device} has FP4 units"
    return "none", (
        f"the checkpoint is W4A4, but {device} has no FP4 units, so that rounding activations to "
        "4 bits would lose accuracy and win nothing; activations='nvfp4' does it anyway"
    )
