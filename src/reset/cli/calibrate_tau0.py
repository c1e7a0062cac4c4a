"""The first part of `reset-calibrate`: tau_0, found here, given, or taken from the file."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvfp4r.console import count_progress
from reset.calibrate import Calibration, percentile_threshold, text_sha256
from reset.cli import options
from reset.config import ReSETConfig
from reset.evaluate.engines import Engine
from reset.evaluate.store import differences
from reset.texts import read_problems

GIVEN = "given with --tau0"


@dataclass(frozen=True)
class ThresholdFlags:
    """What the command was told.

    Raises:
        ValueError: a value out of range.
    """

    data: str
    problems: int
    percentile: float
    temperature: float
    top_p: float
    max_tokens: int
    batch_size: int
    seed: int
    thinking: bool | None
    tau0: float | None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"--batch-size is {self.batch_size}; it must be at least 1")
        options.check_sampling(self.max_tokens, self.top_p, self.seed)
        ReSETConfig(policy="fixed", base_temp=self.temperature, tau_0=self.tau0)
        percentile_threshold([[0.0]], self.percentile)

    @property
    def sampling(self) -> dict[str, Any]:
        """As `find_threshold` keeps it."""
        names = ("temperature", "top_p", "seed", "batch_size", "max_tokens", "thinking")
        return {name: getattr(self, name) for name in names}


def read_threshold_problems(flags: ThresholdFlags, left_out: Collection[str]) -> list[str]:
    """The problems that tau_0 will come from. Raises as `read_problems`."""
    return read_problems(
        flags.data, flags.problems, leave_out=lambda text: text_sha256(text) in left_out
    )


def find_or_take(
    flags: ThresholdFlags, problems: Sequence[str], engine: Engine, model: str
) -> Calibration:
    """tau_0 with its origin: --tau0 if it was given, else that of the model.

    Raises:
        ValueError: as `find_threshold`.
    """
    if flags.tau0 is not None:
        about = engine.describe()
        return Calibration(
            config={"tau_0": flags.tau0},
            percentile=flags.percentile,
            model=model,
            model_sha256=about.get("model_sha256", ""),  # a server does not tell
            quantisation=about.get("quantisation", {}),
            data=flags.data,
            problems=[],
            tokens=[],
            truncated=0,
            sampling=flags.sampling,
            versions=about.get("versions", {}),
            rule=GIVEN,
        )
    from reset.evaluate.engines.hf import TransformersEngine
    from reset.evaluate.threshold import find_threshold

    assert isinstance(engine, TransformersEngine)
    with count_progress("decoding", len(problems), "problems") as advance:
        return find_threshold(
            engine,
            problems,
            data=flags.data,
            percentile=flags.percentile,
            on_progress=advance,
            temperature=flags.temperature,
            top_p=flags.top_p,
            max_tokens=flags.max_tokens,
            batch_size=flags.batch_size,
            seed=flags.seed,
        )


def check_same_flags(stored: Calibration, flags: ThresholdFlags, file: Path) -> None:
    """Refuses a tau_0 that the flags would not have led to.

    Raises:
        ValueError: names what differs.
    """
    was = {"data": stored.data, "percentile": stored.percentile, "sampling": stored.sampling}
    now = {"data": flags.data, "percentile": flags.percentile, "sampling": flags.sampling}
    if stored.rule == GIVEN or flags.tau0 is not None:
        was["tau0"] = stored.config["tau_0"] if stored.rule == GIVEN else None
        now["tau0"] = flags.tau0
    else:
        was["num_problems"], now["num_problems"] = len(stored.problems), flags.problems
    found = [f"{name} was {old!r}, is {new!r}" for name, old, new in differences(was, now)]
    if found:
        raise ValueError(
            f"{file}: its tau_0 was found with other settings: {'; '.join(found)}. Use the same "
            "ones, or calibrate into another file"
        )


def check_same_model(found: Calibration, engine: Engine, file: Path) -> None:
    """Refuses a tau_0 of another model, as far as the engine says which one it has.

    Raises:
        ValueError: the checksums differ.
    """
    now = engine.describe().get("model_sha256")
    if now is not None and found.model_sha256 and now != found.model_sha256:
        raise ValueError(
            f"{file}: its tau_0 belongs to another model ({found.model}, sha256 "
            f"{found.model_sha256[:12]}), this one has {now[:12]}; calibrate into another file"
        )
