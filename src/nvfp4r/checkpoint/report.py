"""What `nvfp4r inspect` tells about a checkpoint, as data.

Statistics of every parameter, groups that engines fuse, totals, problems. It judges nothing itself:
problems are those that reader.py finds. This module prints nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4r.checkpoint.reader import NVFP4Checkpoint
from nvfp4r.format import NVFP4Tensor, row_chunks
from nvfp4r.groups import fused_groups
from nvfp4r.naming import layer_pattern
from nvfp4r.threads import one_thread_per_operation

Progress = Callable[[str, int, int, int, int], None]


@dataclass(frozen=True)
class TensorReport:
    """One parameter. The last five are None unless it is quantised and its content is sound.

    Attributes:
        name: parameter name.
        module: without ".weight".
        shape: [N, K] for quantised ones.
        kind: "nvfp4", "bf16", "f32", ...
        nbytes: stored bytes, scales of the weight included.
        bits_per_parameter: stored bits per value.
        global_scale: multiplier.
        block_scale_min, block_scale_max: over all blocks, without the global scale.
        saturated_share: values with magnitude 6, the largest code, 0..1; one in 16 is the least
            that one expects, as the largest value of a block usually gets it.
        input_scale: multiplier; None in W4A16.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    kind: str
    nbytes: int
    bits_per_parameter: float
    global_scale: float | None = None
    block_scale_min: float | None = None
    block_scale_max: float | None = None
    saturated_share: float | None = None
    input_scale: float | None = None


@dataclass(frozen=True)
class UnequalGroup:
    """Layers that engines fuse although their global scales differ, and the largest ratio."""

    members: tuple[str, ...]
    global_scales: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return max(self.global_scales) / min(self.global_scales)


@dataclass(frozen=True)
class CheckpointReport:
    """All about one checkpoint.

    Attributes:
        rotation: of the inputs of quantised modules, None if they are taken as they are.
        groups: number of fused groups among the quantised modules.
        unequal_groups: those whose members have different global scales; allowed.
        quantised_bits: stored bits per parameter of the quantised ones; None without any.
        problems: one line each, empty for a sound checkpoint.
    """

    path: Path
    dialect: str
    activations: str
    rotation: str | None
    producer: str
    exclude: tuple[str, ...]
    kv_cache: str | None
    kv_scales: dict[str, float]
    tensors: tuple[TensorReport, ...]
    groups: int
    unequal_groups: tuple[UnequalGroup, ...]
    problems: tuple[str, ...]

    @property
    def parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def quantised(self) -> tuple[TensorReport, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.kind == "nvfp4")

    @property
    def quantised_bits(self) -> float | None:
        parameters = sum(math.prod(tensor.shape) for tensor in self.quantised)
        stored_bytes = sum(tensor.nbytes for tensor in self.quantised)
        return 8 * stored_bytes / parameters if parameters else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self),
            "path": str(self.path),
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "quantised_modules": len(self.quantised),
            "quantised_bits_per_parameter": self.quantised_bits,
        }


def inspect_checkpoint(
    checkpoint: NVFP4Checkpoint, progress: Progress | None = None
) -> CheckpointReport:
    """Reads every tensor, twice: for the problems and for the statistics.

    Args:
        checkpoint: opened with `check=False`, so that damaged ones can be inspected.
        progress: called after each parameter with its name, tensors done and in all, bytes done and
            in all.
    """
    names = checkpoint.names()
    total = sum(checkpoint.info(name).nbytes for name in names)
    tensors: list[TensorReport] = []
    done = 0
    with one_thread_per_operation():
        problems = checkpoint.problems()
        for count, name in enumerate(names, start=1):
            tensors.append(_tensor_report(checkpoint, name))
            done += tensors[-1].nbytes
            if progress is not None:
                progress(name, count, len(names), done, total)
    scales = {t.module: t.global_scale for t in tensors if t.global_scale is not None}
    groups = fused_groups(checkpoint.modules)
    unequal = []
    for group in groups:
        values = tuple(scale for scale in (scales.get(name) for name in group) if scale is not None)
        if len(values) == len(group) and len(set(values)) > 1:
            unequal.append(UnequalGroup(group, values))
    return CheckpointReport(
        path=checkpoint.path,
        dialect=checkpoint.dialect,
        activations=checkpoint.activations,
        rotation=checkpoint.rotation,
        producer=checkpoint.quant.producer,
        exclude=checkpoint.exclude,
        kv_cache=checkpoint.quant.kv_cache,
        kv_scales=checkpoint.kv_scales,
        tensors=tuple(tensors),
        groups=len(groups),
        unequal_groups=tuple(unequal),
        problems=tuple(problems),
    )


def _tensor_report(checkpoint: NVFP4Checkpoint, name: str) -> TensorReport:
    info = checkpoint.info(name)
    module = name.removesuffix(".weight")
    values = max(1, math.prod(info.shape))
    report = TensorReport(
        name, module, info.shape, info.dtype.lower(), info.nbytes, 8 * info.nbytes / values
    )
    if report.kind != "nvfp4":
        return report
    try:
        tensor = checkpoint[name]
    except ValueError:
        return report  # it is among the problems
    if not isinstance(tensor, NVFP4Tensor):
        raise TypeError(f"{name}: is listed as NVFP4, but reads as {type(tensor).__name__}")
    scales = tensor.block_scale.float()
    input_scale = checkpoint.input_scale(module)
    return TensorReport(
        **{
            **vars(report),
            "global_scale": float(tensor.global_scale),
            "block_scale_min": float(scales.min()),
            "block_scale_max": float(scales.max()),
            "saturated_share": _saturated_share(tensor.codes),
            "input_scale": None if input_scale is None else float(input_scale),
        }
    )


def _saturated_share(packed: Tensor) -> float:
    """Share of codes [N, K/2] with the largest magnitude, of either sign."""
    found = 0
    for rows in row_chunks(*packed.shape):
        for magnitude in (0b0000_0111, 0b0111_0000):  # low nibble, high nibble
            # count_nonzero is several times faster than the sum of a boolean tensor
            found += int(torch.count_nonzero((packed[rows] & magnitude) == magnitude))
    return found / (2 * packed.numel())


def collapse(tensors: Iterable[TensorReport]) -> list[tuple[TensorReport, ...]]:
    """Groups of parameters that differ in layer numbers alone, in order of first appearance."""
    groups: dict[tuple[str, tuple[int, ...], str], list[TensorReport]] = {}
    for tensor in tensors:
        key = (layer_pattern(tensor.name), tensor.shape, tensor.kind)
        groups.setdefault(key, []).append(tensor)
    return [tuple(group) for group in groups.values()]
