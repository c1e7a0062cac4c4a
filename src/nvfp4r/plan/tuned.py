"""Plans that were measured to be faster on one GPU than the rule's, kept on disk.

One JSON file a GPU model, beside the compiled kernels. It is used where it was made: by the same
kernels, on the same kind of GPU. Anything else in its place is ignored, with a warning that names
it, and so is a file with an entry that the kernels could not run. Deleting it is safe at any time.

Knows what a plan is, not how one is found (tuning/) or launched.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nvfp4r.jit import kernel_sources
from nvfp4r.jit.cache import FOLDER_VARIABLE, cache_folder, replace_file
from nvfp4r.plan import (
    TOKEN_RANGES,
    DeviceFacts,
    Split,
    plan_with,
)
from nvfp4r.plan.medium import MediumSplit
from nvfp4r.plan.small import MAX_SMALL_M, SmallSplit

SWITCH_VARIABLE = "NVFP4R_TUNED_PLANS"
"""Environment variable: 0 leaves tuned plans unused; unset, empty or 1 uses them."""

_FORMAT = 1
_log = logging.getLogger(__name__)


class Problem(NamedTuple):
    """What a tuned plan is for.

    Attributes:
        tokens: first and last M, one of `plan.TOKEN_RANGES`.
        N, K, order: of the packed weight.
        quantised: whether x has to be rounded to NVFP4.
    """

    tokens: tuple[int, int]
    N: int
    K: int
    order: str
    quantised: bool


@dataclass(frozen=True)
class Tuned:
    """What to use instead of the rule's split, and why.

    Attributes:
        split: for every M of the range.
        us, default_us: time with it and by the rule, over all M that were measured.
    """

    split: Split
    us: float
    default_us: float

    @property
    def reason(self) -> str:
        share = 1 - self.us / self.default_us
        return f"tuned on this GPU: takes {share:.0%} less time than the rule's plan"


TunedPlans = Mapping[Problem, Tuned]


@dataclass(frozen=True)
class TunedFile:
    """Where the tuned plans of one GPU are kept, and what they are valid for.

    Attributes:
        path: of the file.
        gpu: name of the GPU, as torch tells it.
        facts: of the GPU.
        sources: what `sources_key` says of the kernels.
    """

    path: Path
    gpu: str
    facts: DeviceFacts
    sources: str

    def read(self) -> dict[Problem, Tuned]:
        """What is in the file; nothing, and one warning, if that cannot be used here."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            return self._ignored(f"cannot be read ({error})")
        try:
            return self._parsed(json.loads(text))
        except (ValueError, TypeError, KeyError) as error:
            return self._ignored(f"is damaged ({type(error).__name__}: {error})")

    def write(self, plans: TunedPlans, driver: str | None) -> None:
        """Replaces the file, whole or not at all.

        Args:
            plans: all that it shall hold.
            driver: version of the NVIDIA driver, for people who read the file.

        Raises:
            OSError: the folder cannot be written; names it.
        """
        document = {
            "format": _FORMAT,
            "gpu": self.gpu,
            "sm_count": self.facts.sm_count,  # a part of a GPU has the same name as the whole
            "sources": self.sources,
            "driver": driver,
            "plans": [
                {**problem._asdict(), "split": asdict(tuned.split), **_times(tuned)}
                for problem, tuned in sorted(plans.items(), key=lambda item: item[0])
            ],
        }
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self.path, (json.dumps(document, indent=1) + "\n").encode())
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self.path}: tuned plans cannot be kept ({error.strerror or error}); set "
                f"{FOLDER_VARIABLE} to a folder that can be written",
            ) from error

    def _parsed(self, document: Any) -> dict[Problem, Tuned]:
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise ValueError(f"it is no object of format {_FORMAT}")
        if document["sources"] != self.sources:
            return self._ignored("was made for other kernels than these")
        made_for, here = (document["gpu"], document["sm_count"]), (self.gpu, self.facts.sm_count)
        if made_for != here:
            told = "{} with {} SMs".format
            return self._ignored(f"was made for {told(*made_for)}, and this is {told(*here)}")
        return dict(self._entry(**entry) for entry in document["plans"])

    def _entry(
        self,
        tokens: list[int],
        N: int,
        K: int,
        order: str,
        quantised: bool,
        split: dict[str, Any],
        us: float,
        default_us: float,
    ) -> tuple[Problem, Tuned]:
        """Refuses what could not be launched for every M of its range.

        Above 8 tokens that is linear_medium, whichever kernel the rule would choose.
        """
        if not isinstance(split, dict):
            raise ValueError(f"split is {split!r}, need an object")
        flags = (quantised, split.get("shared_x", False))
        numbers = (*tokens, N, K, *(split[name] for name in split if name != "shared_x"))
        if {type(number) for number in numbers} != {int} or {type(flag) for flag in flags} != {
            bool
        }:
            raise ValueError(f"need whole numbers, got {numbers}, and true or false, got {flags}")
        first, last = tokens
        if (first, last) not in TOKEN_RANGES:
            raise ValueError(f"tokens are {tokens}, need one of {TOKEN_RANGES}")
        problem = Problem((first, last), N, K, order, quantised)
        made = SmallSplit(**split) if last <= MAX_SMALL_M else MediumSplit(**split)
        plan_with(made, last, N, K, order, self.facts, quantised, reason="")
        return problem, Tuned(made, float(us), float(default_us))

    def _ignored(self, fault: str) -> dict[Problem, Tuned]:
        _log.warning(
            "%s %s; its tuned plans are not used. Make them anew with nvfp4r bench --tune, or "
            "delete the file",
            self.path,
            fault,
        )
        return {}


def _times(tuned: Tuned) -> dict[str, float]:
    return {"us": round(tuned.us, 3), "default_us": round(tuned.default_us, 3)}


def tuned_file(gpu: str, facts: DeviceFacts) -> TunedFile | None:
    """The file for a GPU; None if there is no folder to keep it in.

    Args:
        gpu: its name, as torch tells it.
        facts: what plans know of it.
    """
    folder = cache_folder()
    if folder is None:
        return None
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return TunedFile(folder / f"plans-{slug}.json", gpu, facts, sources_key())


def load_tuned(gpu: str, facts: DeviceFacts) -> TunedPlans:
    """The tuned plans of a GPU; none if they are switched off, or there are none to be used.

    Raises:
        ValueError: the switch is neither 0 nor 1.
    """
    switch = os.environ.get(SWITCH_VARIABLE, "")
    if switch not in ("", "0", "1"):
        raise ValueError(f"{SWITCH_VARIABLE} is {switch!r}; set it to 0 or 1, or unset it")
    file = None if switch == "0" else tuned_file(gpu, facts)
    return {} if file is None else file.read()


def sources_key() -> str:
    """Hash of the CUDA sources: times of other kernels say nothing."""
    return hashlib.sha256(json.dumps(kernel_sources()).encode()).hexdigest()
