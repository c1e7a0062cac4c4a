"""What a request may choose: temperatures, thresholds, window, policy, estimator.

Knows the legal ranges and the published presets. Knows nothing of tensors, tokenizers or engines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib import resources
from numbers import Real
from pathlib import Path
from typing import Any

from reset.presets import read_entry

POLICIES = ("reset", "fixed", "threshold", "sliding", "relative", "uniform")
ESTIMATORS = ("hybrid", "window", "causal", "ema")

_NEEDS_TAU_0 = ("reset", "threshold")
_MAX_WINDOW = 65_536


@dataclass(frozen=True)
class ReSETConfig:
    """Parameters of one request's temperature policy (docs/policy.md has the equations).

    Args:
        t_low: temperature of a token below its threshold, >= 0, at most `t_high`. Per model: there
            is no default. Values up to 1e-6 mean exact argmax.
        tau_0: global entropy threshold in nats, >= 0. Per model: there is no default.
        t_high: temperature of a token at or above its threshold. 1.0 suits long-reasoning models
            only; calibrate it for others.
        window: w, how many entropies the window mean covers and how many a step must hold before
            its own mean is used; 1 .. 65,536.
        policy: "reset" (the method), or one of the comparisons "fixed", "threshold", "sliding",
            "relative", "uniform".
        estimator: how H_step is estimated: "hybrid", "window", "causal" or "ema".
        base_temp: the one temperature of policy "fixed".

    Raises:
        ValueError: a value is out of range, or `t_low` / `tau_0` is missing where the policy uses
            it. The message names the field.
        TypeError: a value is not a number.

    Example:
        >>> print(ReSETConfig(t_low=0.1, tau_0=0.5505))
        reset: T_low 0.1, T_high 1.0, tau_0 0.5505 nats, window 32, estimator hybrid
        >>> ReSETConfig.preset("Qwen/Qwen3-14B").t_low
        0.3
    """

    t_low: float | None = None
    tau_0: float | None = None
    t_high: float = 1.0
    window: int = 32
    policy: str = "reset"
    estimator: str = "hybrid"
    base_temp: float = 0.6

    def __post_init__(self) -> None:
        _choice("policy", self.policy, POLICIES)
        _choice("estimator", self.estimator, ESTIMATORS)
        for name in ("t_low", "tau_0", "t_high", "base_temp"):
            value = getattr(self, name)
            if value is None and name in ("t_low", "tau_0"):
                continue
            object.__setattr__(self, name, _non_negative(name, value))
        if isinstance(self.window, bool) or not isinstance(self.window, int):
            raise TypeError(f"window is {self.window!r}; it must be an integer, the default is 32")
        if not 1 <= self.window <= _MAX_WINDOW:
            raise ValueError(
                f"window is {self.window}; it must be between 1 and {_MAX_WINDOW} tokens, "
                "the published value is 32"
            )
        if self.policy != "fixed" and self.t_low is None:
            raise ValueError(_missing("t_low", self.policy))
        if self.policy in _NEEDS_TAU_0 and self.tau_0 is None:
            raise ValueError(_missing("tau_0", self.policy))
        if self.t_low is not None and self.t_low > self.t_high:
            raise ValueError(
                f"t_low is {self.t_low} and t_high is {self.t_high}; t_low must not exceed t_high. "
                "Swap them, or lower t_low"
            )

    def __str__(self) -> str:
        if self.policy == "fixed":
            return f"fixed: T {self.base_temp}"
        tau = f", tau_0 {round(self.tau_0, 4)} nats" if self.tau_0 is not None else ""
        return (
            f"{self.policy}: T_low {self.t_low}, T_high {self.t_high}{tau}, "
            f"window {self.window}, estimator {self.estimator}"
        )

    @property
    def may_be_greedy(self) -> bool:
        """True if some token of this request may be chosen by exact argmax (T <= 1e-6)."""
        used = [self.base_temp] if self.policy == "fixed" else [self.t_low, self.t_high]
        return any(t is not None and t <= GREEDY_TEMPERATURE for t in used)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ReSETConfig:
        """Build from plain values; an unknown key is a ValueError that lists the legal ones."""
        legal = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(legal))
        if unknown:
            raise ValueError(f"unknown field(s) {', '.join(unknown)}; legal are {', '.join(legal)}")
        return cls(**dict(values))

    @classmethod
    def preset(cls, model: str, **overrides: Any) -> ReSETConfig:
        """The published values for `model`, e.g. "Qwen3-8B" or "Qwen/Qwen3-8B".

        They were found for the W4A4 NVFP4 model on long mathematical reasoning; for anything else
        run `reset-calibrate`. `overrides` replace single fields.

        Raises:
            ValueError: no preset has this name; the message lists those that exist.
        """
        presets = published_presets()
        wanted = model.rsplit("/", 1)[-1].lower()
        for name, values in presets.items():
            if name.lower() == wanted:
                return cls(**{**values, **overrides})
        raise ValueError(
            f"no preset is named {model!r}; presets exist for {', '.join(presets)}. "
            "For another model run reset-calibrate"
        )

    @classmethod
    def from_file(
        cls, path: str | Path, *, name: str | None = None, **overrides: Any
    ) -> ReSETConfig:
        """Values from a file that `reset-calibrate --output` wrote; `overrides` replace fields.

        Where the search of `reset-calibrate` recommends a fixed temperature, the policy is "fixed".

        Args:
            path: the file.
            name: which preset, in a file that holds several.
            overrides: fields of this class.

        Raises:
            ValueError: the file is not such a file, holds no preset of this name, or lacks a value
                that the policy needs; then the message tells what the calibration recommends.
            TypeError: a value in it is not a number.
        """
        entry = read_entry(Path(path), name)
        values = {**entry["config"], **overrides}
        said = entry.get("recommendation")
        if isinstance(said, str) and "t_low" not in values and values.get("policy") != "fixed":
            raise ValueError(f'{path} holds no t_low: its search ended in "{said}"')
        return cls.from_dict(values)


GREEDY_TEMPERATURE = 1e-6
"""At or below this temperature a token is the exact argmax, the lowest id among equals."""


def published_presets() -> dict[str, dict[str, float]]:
    """Model name -> {"t_low": ..., "tau_0": ...} as published (arXiv 2606.13233)."""
    text = resources.files("reset").joinpath("presets.json").read_text(encoding="utf-8")
    presets: dict[str, dict[str, float]] = json.loads(text)["presets"]
    return presets


def _choice(name: str, value: Any, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(legal)}")


def _non_negative(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name} is {number}; it must be finite and >= 0")
    return number


def _missing(name: str, policy: str) -> str:
    return (
        f"{name} is missing and policy {policy!r} needs it: it is a property of the model, so "
        f"there is no default. Find it with reset-calibrate, or use a published preset "
        f"({', '.join(published_presets())})"
    )
