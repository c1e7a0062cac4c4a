"""`nvfp4r.status`: what runs where in this process, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nvfp4r.naming import counted, layer_pattern
from nvfp4r.vllm.record import LayerEntry, PathCount, PathRange, Record, paths, record
from nvfp4r.vllm.settings import NO_LIMIT, Settings
from nvfp4r.vllm.versions import UnknownVllmError, check_version, installed_version


@dataclass(frozen=True)
class LayerGroup:
    """Layers that compute alike.

    Attributes:
        layers: names with their numbers replaced, and how many there are of each.
        N, K: outputs and inputs of one layer on this rank.
        dialect: of the checkpoint; "vllm" where vLLM chose the kernel and merged global scales.
        stored_activations: what the checkpoint says.
        activations: what is done: "nvfp4" or "none".
        activations_reason: why.
        rotation: of inputs before all else, None if there is none.
        architecture: what kernels are compiled for, "cpu" on a CPU.
        dtype: "bf16" or "f16".
        gemv_max_m: the limit that the layers were built with, None if there is none.
        unequal_scales: how many of the layers are fused from parts of different global scales.
        paths: which path (`path_for`) serves which numbers of tokens M, and why.
        calls: calls by path; of all layers of this N, K and activation mode.
    """

    layers: tuple[str, ...]
    N: int
    K: int
    dialect: str
    stored_activations: str
    activations: str
    activations_reason: str
    rotation: str | None
    architecture: str
    dtype: str
    gemv_max_m: int | None
    unequal_scales: int
    paths: tuple[PathRange, ...]
    calls: dict[str, PathCount]


@dataclass(frozen=True)
class Status:
    """What the plug-in does in this process.

    Attributes:
        settings: what models that are built from now on will get.
        vllm: installed version, None if there is none.
        problem: why the plug-in cannot run with it, None if it can.
        groups: layers on this project's ops, largest matrices first.
        declined: NVFP4 layers that were left to vLLM, counted, by reason.
        calls: calls of the op by path. They are calls in Python: a CUDA graph makes them when it
            is captured, and none when it is replayed.
    """

    settings: Settings
    vllm: str | None
    problem: str | None
    groups: tuple[LayerGroup, ...]
    declined: dict[str, int]
    calls: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """For JSON, and for what vLLM sends between processes."""
        return asdict(self)

    def __str__(self) -> str:
        """A few lines for people."""
        settings = self.settings
        lines = [
            f"nvfp4r is {'on' if settings.enabled else 'off'} for vLLM {self.vllm}: "
            f"gemv_max_m={settings.gemv_max_m}, activations={settings.activations}"
            + (f"; {self.problem}" if self.problem else "")
        ]
        for group in self.groups:
            where = ", ".join(
                f"M {part.first}{'+' if part.last is None else f'-{part.last}'} {part.path}"
                for part in group.paths
            )
            lines.append(
                f"  {group.N} x {group.K} {group.dtype} {group.dialect} on {group.architecture}: "
                f"{where}; activations {group.activations} ({group.activations_reason})"
                f"{', rotated by ' + group.rotation if group.rotation else ''}; "
                f"{', '.join(group.layers)}"
            )
        lines += [f"  left to vLLM, {n} layers: {why}" for why, n in self.declined.items()]
        if not self.groups and not self.declined:
            lines.append("  no NVFP4 layer has been built in this process")
        calls = ", ".join(f"{path} {count}" for path, count in self.calls.items()) or "none"
        return "\n".join([*lines, f"  calls by path: {calls}"])


def status(reset_counts: bool = False) -> Status:
    """What the plug-in has built in this process, what runs where and why.

    vLLM builds models in processes of its own unless VLLM_ENABLE_V1_MULTIPROCESSING is 0. Those
    answer `llm.collective_rpc("nvfp4r_status")` if the engine was made with
    `worker_extension_cls="nvfp4r.vllm.worker.StatusExtension"`.

    Args:
        reset_counts: start counting calls anew afterwards.

    Raises:
        ValueError: an environment variable of the plug-in holds something else than it may.
    """
    seen = record()
    answer = Status(
        settings=Settings.from_environment(),
        vllm=installed_version(),
        problem=_problem(),
        groups=tuple(_groups(seen)),
        declined=_declined(seen),
        calls=dict(seen.calls_by_path()),
    )
    if reset_counts:
        seen.reset_counts()
    return answer


def _problem() -> str | None:
    version = installed_version()
    if version is None:
        return "vLLM is not installed"
    try:
        check_version(version)
    except UnknownVllmError as error:
        return str(error)
    return None


def _groups(seen: Record) -> list[LayerGroup]:
    alike: dict[tuple[Any, ...], list[LayerEntry]] = {}
    for entry in list(seen.layers.values()):
        key = (entry.shape, entry.dialect, entry.stored_activations, entry.reason)
        alike.setdefault((*key, entry.architecture, entry.device_index), []).append(entry)
    groups = []
    for entries in alike.values():
        first = entries[0]
        shape = first.shape
        groups.append(
            LayerGroup(
                layers=tuple(counted(layer_pattern(entry.name) for entry in entries)),
                N=shape.N,
                K=shape.K,
                dialect=first.dialect,
                stored_activations=first.stored_activations,
                activations="nvfp4" if shape.quantised else "none",
                activations_reason=first.reason,
                rotation=shape.rotation,
                architecture=first.architecture,
                dtype=shape.order,
                gemv_max_m=None if shape.gemv_max_m == NO_LIMIT else shape.gemv_max_m,
                unequal_scales=sum(entry.global_scales > 1 for entry in entries),
                paths=tuple(paths(shape, first.facts, first.device_index)),
                calls={path: count for (of, path), count in seen.counts.items() if of == shape},
            )
        )
    return sorted(groups, key=lambda group: (-group.N * group.K, group.layers))


def _declined(seen: Record) -> dict[str, int]:
    reasons: dict[str, int] = {}
    for reason in seen.declined.values():
        reasons[reason] = reasons.get(reason, 0) + 1
    return reasons
