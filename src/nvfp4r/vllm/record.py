"""What the plug-in has built and run in this process, for `nvfp4r.status` and logs.

vLLM builds layers and calls ops far from whoever asks for a status, so this is the one place of the
plug-in that holds state of a process: `record()`. Layers are held weakly; they go with their model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from nvfp4r.checkpoint.dialects import Activations
from nvfp4r.launches import plan_for
from nvfp4r.plan import DeviceFacts, choose_plan
from nvfp4r.plan.medium import MAX_KERNEL_M
from nvfp4r.vllm.settings import NO_LIMIT


class LayerShape(NamedTuple):
    """What decides how a layer computes.

    Attributes:
        N, K: outputs and inputs on this rank.
        order: "bf16" or "f16", the dtype of activations.
        quantised: whether activations are rounded to NVFP4.
        gemv_max_m: largest M of the kernels, NO_LIMIT if the plan alone decides.
        rotation: of x before all else, None for most checkpoints.
    """

    N: int
    K: int
    order: str
    quantised: bool
    gemv_max_m: int
    rotation: str | None = None


@dataclass(frozen=True)
class LayerEntry:
    """A layer that runs on the ops of this project.

    Attributes:
        name: of the module.
        shape: see `LayerShape`.
        dialect: of the checkpoint, or "vllm" where vLLM itself chose the kernel and merged the
            global scales before.
        stored_activations: what the checkpoint says.
        reason: why activations are rounded, or are not.
        architecture: what kernels are compiled for, such as "sm_90a"; "cpu" on a CPU.
        facts: of the GPU, None where there are no kernels.
        global_scales: how many different ones its rows have.
        device_index: of the GPU, whose tuned plans count.
    """

    name: str
    shape: LayerShape
    dialect: str
    stored_activations: Activations
    reason: str
    architecture: str
    facts: DeviceFacts | None
    global_scales: int
    device_index: int | None = None


def path_for(
    M: int, shape: LayerShape, facts: DeviceFacts | None, device_index: int | None = None
) -> tuple[str, str]:
    """How M tokens go through a layer, and why.

    Args:
        device_index: of the GPU, None to leave plans that were tuned for it out of account.

    Returns:
        path: "small", "medium" or "large" (kernels), "unpack" (dense product on unpacked rows) or
            "reference" (the same on a CPU).
        reason: a sentence for people.
    """
    if facts is None:
        return "reference", "there are no kernels for this device; the op computes the reference"
    if shape.gemv_max_m < M:
        return "unpack", f"M = {M} is above gemv_max_m = {shape.gemv_max_m}"
    sizes = M, shape.N, shape.K, shape.order, facts
    quantised = shape.quantised or shape.rotation is not None
    if device_index is None:
        plan = choose_plan(*sizes, quantised)
    else:
        plan = plan_for(*sizes, device_index, quantised)
    return plan.path, plan.reason


@dataclass(frozen=True)
class PathRange:
    """Consecutive M that one path serves; `last` is None for all above."""

    first: int
    last: int | None
    path: str
    reason: str


def paths(
    shape: LayerShape, facts: DeviceFacts | None, device_index: int | None = None
) -> Iterator[PathRange]:
    """The paths of a layer for M = 1, 2, ... in ranges; the reason is that of the first M."""
    first, (path, reason) = 1, path_for(1, shape, facts, device_index)
    changes = list(range(2, MAX_KERNEL_M + 2))  # above, the limit alone changes anything
    if changes[-1] <= shape.gemv_max_m < NO_LIMIT:
        changes.append(shape.gemv_max_m + 1)
    for M in changes:
        found = path_for(M, shape, facts, device_index)
        if found[0] != path:
            yield PathRange(first, M - 1, path, reason)
            first, (path, reason) = M, found
    yield PathRange(first, None, path, reason)


@dataclass
class PathCount:
    """Calls of one path by one shape; M from the smallest to the largest seen."""

    calls: int
    smallest_m: int
    largest_m: int


class Record:
    """Layers, calls, and layers that were left to vLLM."""

    def __init__(self) -> None:
        self.layers: WeakKeyDictionary[nn.Module, LayerEntry] = WeakKeyDictionary()
        self.declined: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self.counts: dict[tuple[LayerShape, str], PathCount] = {}

    def count(self, shape: LayerShape, path: str, M: int) -> None:
        """One call of the op in Python; a replayed CUDA graph makes none."""
        seen = self.counts.get((shape, path))
        if seen is None:
            seen = self.counts.setdefault((shape, path), PathCount(0, M, M))
        seen.calls += 1
        if seen.smallest_m > M:
            seen.smallest_m = M
        elif seen.largest_m < M:
            seen.largest_m = M

    def calls_by_path(self) -> Counter[str]:
        """Calls since the start of this process or the last `reset_counts`."""
        total: Counter[str] = Counter()
        for (_, path), seen in self.counts.items():
            total[path] += seen.calls
        return total

    def reset_counts(self) -> None:
        self.counts.clear()


@cache
def record() -> Record:
    """The record of this process."""
    return Record()
