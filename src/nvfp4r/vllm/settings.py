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

from nvfp4r.checkpoint.dialects import Activations

ActivationSetting = Literal["auto", "nvfp4", "none"]

ENABLED = "NVFP4R"
GEMV_MAX_M = "NVFP4R_GEMV_MAX_M"
ACTIVATIONS = "NVFP4R_ACTIVATIONS"

NO_LIMIT = 2**31 - 1
"""What ops and records hold for "no limit": more tokens than any call has."""


@dataclass(frozen=True)
class Settings:
    """Validated settings.

    Attributes:
        enabled: whether models that are built from now on use this project's linear layers.
        gemv_max_m: largest number of tokens that the kernels serve, >= 0; above it, and always
            with 0, weights are unpacked for a dense product. None, the default, leaves it to the
            plan (`nvfp4r.plan.choose_plan`).
        activations: of W4A4 checkpoints: "nvfp4" rounds them to 4 bits as the checkpoint says,
            "none" leaves them in 16 bits, "auto" rounds them where the GPU has FP4 units.

    Raises:
        TypeError: a value of a wrong type.
        ValueError: a value out of range; names it.
    """

    enabled: bool = False
    gemv_max_m: int | None = None
    activations: ActivationSetting = "auto"

    def __post_init__(self) -> None:
        limit = self.gemv_max_m
        if limit is not None:
            if isinstance(limit, bool) or not isinstance(limit, int):
                raise TypeError(f"gemv_max_m is {limit!r}, need an int >= 0, or None for no limit")
            if limit < 0:
                raise ValueError(
                    f"gemv_max_m is {limit}, need 0 (the kernels never run) or more, or None for "
                    "no limit"
                )
        if self.activations not in get_args(ActivationSetting):
            raise ValueError(
                f"activations is {self.activations!r}, need one of "
                f"{', '.join(get_args(ActivationSetting))}"
            )

    @property
    def token_limit(self) -> int:
        """`gemv_max_m` as ops and records hold it: 0 .. NO_LIMIT."""
        return NO_LIMIT if self.gemv_max_m is None else min(self.gemv_max_m, NO_LIMIT)

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
        text = environment.get(GEMV_MAX_M)
        if text is not None and not (text.isascii() and text.isdigit()):
            raise ValueError(
                f"{GEMV_MAX_M} is {text!r} in the environment, need an integer >= 0; unset it for "
                "no limit"
            )
        activations = environment.get(ACTIVATIONS, "auto")
        try:
            limit = None if text is None else int(text)
            return cls(enabled == "1", limit, activations)  # type: ignore[arg-type]
        except ValueError as error:
            names = [name for name in (GEMV_MAX_M, ACTIVATIONS) if name in environment]
            held = ", ".join(f"{name}={environment[name]}" for name in names)
            raise ValueError(f"{held} in the environment: {error}") from None

    def environment(self) -> dict[str, str]:
        """The variables that hold these settings; no limit is no variable."""
        limit = {} if self.gemv_max_m is None else {GEMV_MAX_M: str(self.gemv_max_m)}
        return {ENABLED: "1" if self.enabled else "0", ACTIVATIONS: self.activations, **limit}


def change(**values: object) -> Settings:
    """Writes new values into os.environ, where workers that start later find them.

    Raises:
        TypeError, ValueError: see `Settings`; nothing is changed then.
    """
    settings = replace(Settings.from_environment(), **values)  # type: ignore[arg-type]
    variables = settings.environment()
    if GEMV_MAX_M not in variables:
        os.environ.pop(GEMV_MAX_M, None)
    os.environ.update(variables)
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
