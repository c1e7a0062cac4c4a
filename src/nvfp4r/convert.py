"""Quantises a checkpoint folder, tensor by tensor.

`weight_maxima` reads every weight once, for the scales and to find NaN; `convert` reads them again,
quantises them, and hands them to the writer. A few tensors of the source are in memory at a time,
one for each thread, besides the output shard that the writer collects.

This module runs no model: activation maxima come from calibration.py, and what calibrated methods
make of the weights is handed over ready (`TensorSource`). It does not know what is worth quantising
(selection.py), how files name scales or how output appears on disk (checkpoint/).
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from nvfp4r.atomic import check_target
from nvfp4r.checkpoint.dialects import CONFIG_FILE, Activations, Dialect
from nvfp4r.checkpoint.shards import TensorInfo
from nvfp4r.checkpoint.writer import SaveReport, save_checkpoint
from nvfp4r.format import NVFP4Tensor
from nvfp4r.methods import METHODS, Method, check_method
from nvfp4r.methods.four_over_six import global_scale_four_over_six, quantize_four_over_six
from nvfp4r.methods.rotation import quantize_rotated, rotated_amax
from nvfp4r.quantize import global_scale_from_amax, quantize
from nvfp4r.selection import FLOATS, ConversionPlan, module_of, plan_conversion
from nvfp4r.threads import one_thread_per_operation

Progress = Callable[[str, int, int, int, int], None]
"""Called after each tensor with its name, tensors done and in all, source bytes done and in all."""

TensorSource = Callable[[str, Tensor], NVFP4Tensor | Tensor]
"""(parameter name, original tensor) -> what to store: of a quantised weight an NVFP4Tensor of the
same N and K, of any other a tensor of the same shape and dtype, as a rule the original itself. It
is called once for each tensor, one at a time, in the order of the source's files."""

Result = TypeVar("Result")


class _Quantiser(Protocol):
    def __call__(self, weight: Tensor, *, global_scale: Tensor, name: str) -> NVFP4Tensor: ...


class _ScaleRule(Protocol):
    def __call__(self, amax: float, name: str) -> Tensor: ...


_CALIBRATION_FREE: Mapping[str, tuple[_ScaleRule, _Quantiser]] = MappingProxyType(
    {
        "rtn": (global_scale_from_amax, quantize),
        "four-over-six": (global_scale_four_over_six, quantize_four_over_six),
        "brq": (global_scale_from_amax, quantize_rotated),
    }
)

_MAX_THREADS = 4  # each holds a tensor of the source


def weight_maxima(
    plan: ConversionPlan,
    *,
    method: str = "rtn",
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> dict[str, float]:
    """Largest magnitude for each quantised module, shared within fused groups.

    Of what is quantised: for a method with a rotation, of the rotated weights. Reads every tensor
    of the source once and so is also the check that all values are finite.

    Raises:
        ValueError: a tensor holds NaN or infinite values (how many, where the first one is), or a
            file is damaged; an unknown method; weights too large to be rotated.
    """
    rotation = check_method(method).rotation

    def amax(info: TensorInfo, tensor: Tensor) -> float:
        if info.dtype not in FLOATS or tensor.numel() == 0:
            return 0.0
        tensor = tensor.to(device)
        low, high = torch.stack(torch.aminmax(tensor)).tolist()
        if not (math.isfinite(low) and math.isfinite(high)):
            bad = torch.nonzero(~torch.isfinite(tensor))
            raise ValueError(
                f"{info.file}: {info.name} holds {bad.shape[0]} NaN or infinite values of "
                f"{tensor.numel()}, the first at {bad[0].tolist()}, need finite ones; "
                "check the source, or fetch it again"
            )
        if rotation is not None and module_of(info.name) in plan.quantised:
            return rotated_amax(tensor, info.name)
        return max(-low, high)

    with one_thread_per_operation():
        found = {module_of(name): x for name, x in _stream(plan, amax, device, progress)}
    return _share({name: found[name] for name in plan.quantised}, plan.groups)


def _share(maxima: dict[str, float], groups: Sequence[tuple[str, ...]]) -> dict[str, float]:
    shared = {name: max(maxima[name] for name in group) for group in groups for name in group}
    return {**maxima, **shared}


def _stream(
    plan: ConversionPlan,
    work: Callable[[TensorInfo, Tensor], Result],
    device: torch.device | str,
    progress: Progress | None,
    threads: int = _MAX_THREADS,
) -> Iterator[tuple[str, Result]]:
    """Reads every tensor of the source in order and yields its name and what `work` makes of it.

    Tensors are worked on side by side, in one thread each; `threads` is how many at most.
    """
    side_by_side = min(threads, os.cpu_count() or 1) if torch.device(device).type == "cpu" else 1
    infos = plan.tensors.infos.values()
    pending: deque[tuple[TensorInfo, Future[Result]]] = deque()
    count = bytes_done = 0

    def oldest() -> tuple[str, Result]:
        nonlocal count, bytes_done
        info, future = pending.popleft()
        result = future.result()
        count, bytes_done = count + 1, bytes_done + info.nbytes
        if progress is not None:
            progress(info.name, count, len(infos), bytes_done, plan.source_bytes)
        return info.name, result

    with ThreadPoolExecutor(side_by_side) as pool:
        for info in infos:
            pending.append((info, pool.submit(work, info, plan.tensors.get(info.name))))
            # Pages of an open file stay in memory, so that a file left open costs a whole shard.
            plan.tensors.close()
            if len(pending) > side_by_side:
                yield oldest()
        while pending:
            yield oldest()


def convert(
    plan: ConversionPlan,
    output: str | Path,
    maxima: Mapping[str, float] | None,
    *,
    method: str = "rtn",
    stored: TensorSource | None = None,
    dialect: Dialect = "modelopt",
    activations: Activations = "none",
    input_amax: Mapping[str, Tensor] | None = None,
    headroom: float = 1.0,
    device: torch.device | str = "cpu",
    force: bool = False,
    max_shard_bytes: int = 4 << 30,
    progress: Progress | None = None,
) -> SaveReport:
    """Quantises and writes what `plan` says; see `quantise_checkpoint` for further arguments.

    Args:
        maxima: the result of `weight_maxima` for the same plan and method. Not used with `stored`.
        method: one of METHODS, recorded in the output.
        stored: what a calibrated method made of the tensors, for these methods and no others; its
            tensors are then written as they are.
        input_amax: for W4A4, the largest input of every quantised module, after the rotation of
            methods that have one.

    Raises:
        ValueError: as `quantise_checkpoint`; `maxima` or `stored` missing for the method; `stored`
            gave a tensor that does not fit.
    """
    chosen = check_method(method)
    check_dialect(chosen, dialect)
    input_scales = _input_scales(plan, activations, input_amax, headroom)
    if chosen.calibrated:
        work, threads = _checked_source(plan, chosen, stored), 1
    else:
        if stored is not None:
            raise ValueError(
                f"method {method!r} makes its tensors from the weights alone, but `stored` brings "
                "ready ones; leave it out, or name the method that made them"
            )
        work, threads = _quantising(plan, chosen, maxima, device), _MAX_THREADS

    with one_thread_per_operation():
        return save_checkpoint(
            output,
            _stream(plan, work, device, progress, threads),
            config=plan.config,
            dialect=dialect,
            activations=activations,
            exclude=plan.exclude,
            input_scales=input_scales,
            rotation=chosen.rotation,
            producer_details={"method": method},
            max_shard_bytes=max_shard_bytes,
            copy_from=plan.source,
            force=force,
            expected_bytes=plan.output_bytes,
        )


def check_dialect(method: Method, dialect: Dialect) -> None:
    """Raises ValueError if the dialect cannot say what the method does to the inputs of layers."""
    if method.rotation is not None and dialect == "modelopt":
        raise ValueError(
            f"method {method.name!r} rotates the inputs of layers, which the modelopt format "
            "cannot say; use the other one (--format compressed-tensors)"
        )


def _quantising(
    plan: ConversionPlan,
    method: Method,
    maxima: Mapping[str, float] | None,
    device: torch.device | str,
) -> Callable[[TensorInfo, Tensor], Tensor | NVFP4Tensor]:
    missing = [name for name in plan.quantised if name not in (maxima or {})]
    if maxima is None or missing:
        raise ValueError(
            f"method {method.name!r} needs the largest weight of each quantised layer, missing for "
            f"{len(missing)}: {', '.join(missing[:8])}; get them from weight_maxima"
        )
    scale_rule, quantiser = _CALIBRATION_FREE[method.name]
    scales = {name: scale_rule(maxima[name], name) for name in plan.quantised}

    def quantised(info: TensorInfo, tensor: Tensor) -> Tensor | NVFP4Tensor:
        module = module_of(info.name)
        if module not in plan.quantised:
            return tensor
        return quantiser(tensor.to(device), global_scale=scales[module], name=module).to("cpu")

    return quantised


def _checked_source(
    plan: ConversionPlan, method: Method, stored: TensorSource | None
) -> Callable[[TensorInfo, Tensor], Tensor | NVFP4Tensor]:
    if stored is None:
        raise ValueError(
            f"method {method.name!r} runs the model over calibration texts, which is not done "
            f"here; use reset-quantize --method {method.name} --calib-data, or hand over its "
            "tensors as `stored`"
        )
    source = stored

    def checked(info: TensorInfo, tensor: Tensor) -> Tensor | NVFP4Tensor:
        ready = source(info.name, tensor)
        is_quantised = module_of(info.name) in plan.quantised
        wanted = f"NVFP4Tensor {list(info.shape)}" if is_quantised else _described(tensor)
        if _described(ready) != wanted:
            raise ValueError(
                f"{info.name}: method {method.name!r} gave {_described(ready)}, need {wanted}; its "
                "tensors are those of another model or plan, calibrate again"
            )
        if isinstance(ready, Tensor) and ready is not tensor and not torch.isfinite(ready).all():
            raise ValueError(
                f"{info.name}: method {method.name!r} gave NaN or infinite values, need finite "
                "ones; calibrate again, with other texts"
            )
        return ready.to("cpu")

    return checked


def _described(tensor: object) -> str:
    if isinstance(tensor, Tensor):
        return f"{tensor.dtype} {list(tensor.shape)}"
    shape = f" {list(tensor.shape)}" if isinstance(tensor, NVFP4Tensor) else ""
    return f"{type(tensor).__name__}{shape}"


def _input_scales(
    plan: ConversionPlan,
    activations: Activations,
    input_amax: Mapping[str, Tensor] | None,
    headroom: float,
) -> dict[str, Tensor] | None:
    if activations == "none":
        if input_amax is not None or headroom != 1.0:
            raise ValueError(
                "got activation maxima or a headroom for unquantised activations, which have no "
                "scale; leave them out, or ask for activations='nvfp4'"
            )
        return None
    missing = [name for name in plan.quantised if name not in (input_amax or {})]
    if input_amax is None or missing:
        raise ValueError(
            f"activations='nvfp4' needs an activation maximum for each quantised layer, missing "
            f"for {len(missing)}: {', '.join(missing[:8])}; calibrate them (calibration.calibrate)"
        )
    amax = {name: float(input_amax[name]) for name in plan.quantised}
    shared = _share(amax, plan.groups)
    return {name: global_scale_from_amax(value, name, headroom) for name, value in shared.items()}


def quantise_checkpoint(
    source: str | Path,
    output: str | Path,
    *,
    method: str = "rtn",
    dialect: Dialect = "modelopt",
    activations: Activations = "none",
    exclude: Sequence[str] = (),
    input_amax: Mapping[str, Tensor] | None = None,
    headroom: float = 1.0,
    quantise_head: bool = False,
    device: torch.device | str = "cpu",
    force: bool = False,
    max_shard_bytes: int = 4 << 30,
    progress: Progress | None = None,
) -> SaveReport:
    """Quantises the linear layers of a checkpoint folder to NVFP4.

    One global scale per layer, or per group of layers that engines fuse. Output appears only when
    it is whole; the same input gives the same bytes. Runs no model, so that calibrated methods are
    refused.

    Args:
        source: folder with config.json and safetensors in bfloat16, float16 or float32.
        output: folder to make.
        method: one of METHODS that is not calibrated.
        dialect: layout of the output; methods with a rotation need "compressed-tensors".
        activations: "none" for W4A16, "nvfp4" for W4A4 with static input scales.
        exclude: patterns of modules to leave alone, see `groups.matches_any`.
        input_amax: for W4A4, the largest input of every quantised module, after the rotation of
            methods that have one.
        headroom: factor >= 1 on `input_amax`, for inputs larger than calibration saw.
        quantise_head: quantise lm_head too, if the model has one of its own.
        device: where the arithmetic runs.
        force: replace `output` if it exists.
        max_shard_bytes: size of the largest output file, in bytes.
        progress: called after each tensor of the second pass.

    Raises:
        ValueError: see `plan_conversion`, `weight_maxima` and `save_checkpoint`; an unknown or
            calibrated method, or one that the dialect cannot describe; input maxima missing or not
            wanted.
    """
    chosen = check_method(method)
    if chosen.calibrated:
        free = ", ".join(name for name, entry in METHODS.items() if not entry.calibrated)
        raise ValueError(
            f"method {method!r} runs the model over calibration texts, need one of {free} here; "
            f"use reset-quantize --method {method} --calib-data"
        )
    check_dialect(chosen, dialect)
    plan = plan_conversion(source, exclude, quantise_head=quantise_head)
    check_target(Path(output), marker=CONFIG_FILE, force=force, source=plan.source)
    _input_scales(plan, activations, input_amax, headroom)
    return convert(
        plan,
        output,
        weight_maxima(plan, method=method, device=device),
        method=method,
        dialect=dialect,
        activations=activations,
        input_amax=input_amax,
        headroom=headroom,
        device=device,
        force=force,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )
