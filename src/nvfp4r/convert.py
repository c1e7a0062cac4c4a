"""Quantises a checkpoint folder, tensor by tensor.

`weight_maxima` reads every weight once, for the scales and to find NaN; `convert` reads them again,
quantises them, and hands them to the writer. A few tensors of the source are in memory at a time,
one for each thread, besides the output shard that the writer collects.

This module runs no model: activation maxima come from calibration.py. It does not know what is
worth quantising (selection.py), how files name scales (dialects.py) or how output appears on disk
(writer.py).
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from nvfp4r.atomic import check_target
from nvfp4r.dialects import CONFIG_FILE, Activations, Dialect
from nvfp4r.format import NVFP4Tensor
from nvfp4r.quantize import global_scale_from_amax, quantize
from nvfp4r.selection import FLOATS, ConversionPlan, module_of, plan_conversion
from nvfp4r.shards import TensorInfo
from nvfp4r.threads import one_thread_per_operation
from nvfp4r.writer import SaveReport, save_checkpoint

Progress = Callable[[str, int, int, int, int], None]
"""Called after each tensor with its name, tensors done and in all, source bytes done and in all."""

Result = TypeVar("Result")

METHODS = ("rtn",)
"""Ways to choose codes; "rtn" is round to nearest."""

_MAX_THREADS = 4  # each holds a tensor of the source


def weight_maxima(
    plan: ConversionPlan,
    *,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> dict[str, float]:
    """Largest magnitude for each quantised module, shared within fused groups.

    Reads every tensor of the source once and so is also the check that all values are finite.

    Raises:
        ValueError: a tensor holds NaN or infinite values (how many, where the first one is), or a
            file is damaged.
    """

    def amax(info: TensorInfo, tensor: Tensor) -> float:
        if info.dtype not in FLOATS or tensor.numel() == 0:
            return 0.0
        low, high = torch.stack(torch.aminmax(tensor.to(device))).tolist()
        if not (math.isfinite(low) and math.isfinite(high)):
            bad = torch.nonzero(~torch.isfinite(tensor))
            raise ValueError(
                f"{info.file}: {info.name} holds {bad.shape[0]} NaN or infinite values of "
                f"{tensor.numel()}, the first at {bad[0].tolist()}, need finite ones; "
                "check the source, or fetch it again"
            )
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
) -> Iterator[tuple[str, Result]]:
    """Reads every tensor of the source in order and yields its name and what `work` makes of it.

    Tensors are worked on side by side, in one thread each.
    """
    threads = min(_MAX_THREADS, os.cpu_count() or 1) if torch.device(device).type == "cpu" else 1
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

    with ThreadPoolExecutor(threads) as pool:
        for info in infos:
            pending.append((info, pool.submit(work, info, plan.tensors.get(info.name))))
            # Pages of an open file stay in memory, so that a file left open costs a whole shard.
            plan.tensors.close()
            if len(pending) > threads:
                yield oldest()
        while pending:
            yield oldest()


def convert(
    plan: ConversionPlan,
    output: str | Path,
    maxima: Mapping[str, float],
    *,
    method: str = "rtn",
    dialect: Dialect = "modelopt",
    activations: Activations = "none",
    input_amax: Mapping[str, Tensor] | None = None,
    headroom: float = 1.0,
    device: torch.device | str = "cpu",
    force: bool = False,
    max_shard_bytes: int = 4 << 30,
    progress: Progress | None = None,
) -> SaveReport:
    """Quantises and writes what `plan` says; see `quantise_checkpoint` for the arguments.

    Args:
        maxima: the result of `weight_maxima` for the same plan.
    """
    check_method(method)
    input_scales = _input_scales(plan, activations, input_amax, headroom)
    scales = {name: global_scale_from_amax(amax, name) for name, amax in maxima.items()}

    def quantised(info: TensorInfo, tensor: Tensor) -> Tensor | NVFP4Tensor:
        module = module_of(info.name)
        if module not in plan.quantised:
            return tensor
        return quantize(tensor.to(device), global_scale=scales[module], name=module).to("cpu")

    with one_thread_per_operation():
        return save_checkpoint(
            output,
            _stream(plan, quantised, device, progress),
            config=plan.config,
            dialect=dialect,
            activations=activations,
            exclude=plan.exclude,
            input_scales=input_scales,
            producer_details={"method": method},
            max_shard_bytes=max_shard_bytes,
            copy_from=plan.source,
            force=force,
            expected_bytes=plan.output_bytes,
        )


def check_method(method: str) -> None:
    """Raises ValueError unless `method` is one of METHODS."""
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, need one of {', '.join(METHODS)}")


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

    Round to nearest, one global scale per layer, or per group of layers that engines fuse. Output
    appears only when it is whole; the same input gives the same bytes.

    Args:
        source: folder with config.json and safetensors in bfloat16, float16 or float32.
        output: folder to make.
        method: one of METHODS.
        dialect: layout of the output.
        activations: "none" for W4A16, "nvfp4" for W4A4 with static input scales.
        exclude: patterns of modules to leave alone, see `groups.matches_any`.
        input_amax: for W4A4, the largest input of every quantised module.
        headroom: factor >= 1 on `input_amax`, for inputs larger than calibration saw.
        quantise_head: quantise lm_head too, if the model has one of its own.
        device: where the arithmetic runs.
        force: replace `output` if it exists.
        max_shard_bytes: size of the largest output file, in bytes.
        progress: called after each tensor of the second pass.

    Raises:
        ValueError: see `plan_conversion`, `weight_maxima` and `save_checkpoint`; an unknown method;
            input maxima missing or not wanted.
    """
    check_method(method)
    plan = plan_conversion(source, exclude, quantise_head=quantise_head)
    check_target(Path(output), marker=CONFIG_FILE, force=force, source=plan.source)
    _input_scales(plan, activations, input_amax, headroom)
    return convert(
        plan,
        output,
        weight_maxima(plan, device=device),
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
