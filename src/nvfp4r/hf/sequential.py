"""GPTQ over a whole model, decoder layer by decoder layer.

Each layer sees the calibration texts as the quantised layers before it leave them: the texts run
through it once to sum the Hessians of its inputs, its linear layers are rounded (methods/gptq.py),
and they run through it again with the new weights, for the next one. In memory are what surrounds
the decoder layers, one layer, its Hessians, and the hidden states of a text at a time; those of the
others wait in memory or on disk (hidden_states.py).

Finished layers are kept in a folder (work_folder.py), so that a run that was ended goes on where it
was; texts then run through the finished layers once more. What is rotated, rounded and stored is
the same whether it was interrupted or not.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4r import __version__
from nvfp4r.checkpoint.dialects import Activations
from nvfp4r.convert import TensorSource
from nvfp4r.format import NVFP4Tensor
from nvfp4r.hf.hidden_states import HiddenStates, require_room
from nvfp4r.hf.inputs import InputMaxima, Unit, rotated, units_of, watching
from nvfp4r.hf.layers import LayerwiseModel, hidden_bytes
from nvfp4r.methods import check_method
from nvfp4r.methods.gptq import (
    DAMPING,
    METHODS,
    HessianFactor,
    HessianSum,
    factorise,
    quantize_gptq,
)
from nvfp4r.naming import counted, layer_pattern
from nvfp4r.quantize import global_scale_from_amax
from nvfp4r.selection import ConversionPlan, module_of
from nvfp4r.work_folder import WorkFolder

_log = logging.getLogger(__name__)

Progress = Callable[[str, float, int], None]
"""Called with the part at work, layers done (with the share of the one at work) and in all."""

_HEAD = "head"  # part of the output head, after those of the layers
_FIELDS = ("codes", "block_scale", "global_scale")
_AMAX = "input_amax"


def check_architecture(plan: ConversionPlan) -> None:
    """Refuses a model that cannot be calibrated layer by layer, from its configuration and headers.

    Raises:
        ValueError: see `layers.LayerwiseModel`.
    """
    LayerwiseModel(plan, torch.device("cpu"))


def work_folder(
    output: Path,
    plan: ConversionPlan,
    rows: Sequence[Tensor],
    device: torch.device,
    *,
    method: str,
    activations: Activations = "none",
    damping: float = DAMPING,
) -> WorkFolder:
    """Where finished layers of this command are kept, `<output>.work`; makes nothing yet.

    Args:
        rows: token ids [T] int64 each.

    Raises:
        ValueError: the folder holds layers of another command; names the first difference.
    """
    ids = hashlib.sha256()
    for row in rows:
        ids.update(f"{len(row)}:".encode() + row.cpu().numpy().tobytes())
    files = {info.file for info in plan.tensors.infos.values()}
    settings = {
        "version": __version__,
        "model": str(plan.source.resolve()),
        "state of the model's files": [
            [f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in sorted(files)
        ],
        "--method": method,
        "--damping": damping,
        "--activations": activations,
        "--device": device.type,
        "--exclude": list(plan.exclude),
        "number of calibration texts": len(rows),
        "number of calibration tokens": sum(len(row) for row in rows),
        "sequence of calibration tokens (SHA-256)": ids.hexdigest(),
    }
    return WorkFolder(output.with_name(f"{output.name}.work"), settings)


def gptq_tensors(
    plan: ConversionPlan,
    rows: Sequence[Tensor],
    device: torch.device,
    *,
    method: str,
    maxima: Mapping[str, float],
    work: WorkFolder,
    activations: Activations = "none",
    damping: float = DAMPING,
    progress: Progress | None = None,
) -> tuple[TensorSource, dict[str, Tensor] | None]:
    """Runs GPTQ over the decoder layers of a model and keeps each in `work` when it is finished.

    Args:
        plan: names the source and what is to be quantised.
        rows: token ids of the calibration texts, [T] int64 each; each runs alone, without padding.
        device: where everything runs.
        method: one of METHODS.
        maxima: the result of `convert.weight_maxima` for the same plan and method.
        work: from `work_folder`, with the same arguments. Remove it once the checkpoint is written.
        activations: "nvfp4" to measure the largest inputs too.
        damping: see `gptq.factorise`.

    Returns:
        What to store, for `convert.convert`; and for "nvfp4" the largest input of every quantised
        module, float32 [], after the method's rotation. Both read from `work`.

    Raises:
        ValueError: no token; a model that cannot be run layer by layer; NaN or infinite inputs of a
            layer; for "nvfp4", a layer that saw no token. Names it.
        OSError: `work`, or hidden states beside it, cannot be written.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, need one of {', '.join(METHODS)}")
    rows = [row for row in rows if len(row)]
    if not rows:
        raise ValueError("calibration got no token at all, need at least one text; use longer ones")
    model = LayerwiseModel(plan, device)
    run = _Run(plan, model, rows, method, maxima, work, activations == "nvfp4", damping)
    run.all_layers(progress or (lambda part, done, total: None))
    part_of = {module: part for part, modules in run.parts.items() for module in modules}

    def stored(name: str, tensor: Tensor) -> NVFP4Tensor | Tensor:
        module = module_of(name)
        if module not in plan.quantised:
            return tensor
        return _stored(work, part_of[module], module)

    if activations == "none":
        return stored, None
    amax = {m: work.tensor(part_of[m], f"{m}.{_AMAX}") for m in plan.quantised}
    return stored, amax


def finished_records(work: WorkFolder) -> list[dict[str, Any]]:
    """What calibration found for each layer or group that shares inputs, layer by layer.

    Each has "modules", "tokens", "damping", "singular", "dead_inputs" and "rounded_to_nearest"; see
    `gptq.HessianFactor`.
    """
    indices = sorted(int(file.stem) for file in work.path.glob("[0-9]*.safetensors"))
    parts = [_part(index) for index in indices] + ([_HEAD] if work.has(_HEAD) else [])
    return [record for part in parts for record in work.record(part)["inputs"]]


@dataclass
class _Run:
    """One run over all layers of a model."""

    plan: ConversionPlan
    model: LayerwiseModel
    rows: list[Tensor]
    method: str
    maxima: Mapping[str, float]
    work: WorkFolder
    wants_amax: bool
    damping: float

    def __post_init__(self) -> None:
        self.rotation = check_method(self.method).rotation
        self.hidden = HiddenStates(self.work.path.parent, self.model.device)
        self.parts = {_part(i): self.model.modules_of(i) for i in range(self.model.count)}
        self.parts = {part: modules for part, modules in self.parts.items() if modules}
        if self.model.head is not None:
            self.parts[_HEAD] = [self.model.head]

    def all_layers(self, progress: Progress) -> None:
        """Runs what is not finished; layers before it without being summed up again."""
        missing = [part for part in self.parts if not self.work.has(part)]
        if not missing:
            return
        last = self.model.count if missing[-1] == _HEAD else int(missing[-1])
        total = last + 1
        require_room(self.work.path.parent, hidden_bytes(self.plan, self.rows, self.model.device))
        self.say_if_short()
        self.model.load_frame()
        with self.hidden:
            for index in range(min(total, self.model.count)):
                name = f"{self.model.prefix}.{index}"
                advance = partial(_advance, progress, name, index, total)
                self.one_layer(index, index == last, advance)
                advance(1.0)
            if last == self.model.count:
                advance = partial(_advance, progress, _HEAD, last, total)
                self.output_head(advance)
                advance(1.0)

    def say_if_short(self) -> None:
        """Warns of Hessians that cannot but be singular."""
        tokens = sum(len(row) for row in self.rows)
        short = [name for name, info in self.plan.quantised.items() if info.shape[1] > tokens]
        if short:
            _log.warning(
                "calibration has %d tokens, fewer than these layers have inputs, so their Hessians "
                "are singular and lean on damping: %s; use more texts (--calib-samples, "
                "--calib-data)",
                *(tokens, ", ".join(counted(layer_pattern(name) for name in short))),
            )

    def one_layer(self, index: int, is_last: bool, advance: Callable[[float], None]) -> None:
        """Brings the hidden states through a layer with quantised weights, made or read."""
        part, start = _part(index), time.monotonic()
        modules = self.parts.get(part, [])
        self.model.load_layer(index)
        made: dict[str, NVFP4Tensor] = {}
        records: list[dict[str, Any]] = []
        units = units_of(modules, self.plan.groups)
        is_finished = not modules or self.work.has(part)
        if not is_finished:
            hessians = self.hessians(units)
            with self.watching(units, lambda unit, x: hessians[unit].add(x)):
                for i, row in enumerate(self.rows):
                    self.model.run_layer(index, row, self.hidden.get(i))
                    advance((i + 1) / len(self.rows) / 2)
            made, records = self.rounded(hessians)
            del hessians
        elif modules:
            made = {module: _stored(self.work, part, module) for module in modules}
        for module, tensor in made.items():
            self.put_back(module, tensor)
        amax = InputMaxima(units if self.wants_amax and not is_finished else [])
        if not is_last or amax.units:
            with self.watching(amax.units, amax.add):
                for i, row in enumerate(self.rows):
                    hidden = self.model.run_layer(index, row, self.hidden.get(i))
                    if not is_last:
                        self.hidden.put(i, hidden)
                    advance(0.5 + (i + 1) / len(self.rows) / 2)
        self.model.unload_layer(index)
        if not is_finished:
            self.save(part, made, amax, records, start)

    def output_head(self, advance: Callable[[float], None]) -> None:
        """Rounds the output head, the last of all."""
        start = time.monotonic()
        unit = Unit(tuple(self.parts[_HEAD]))
        hessians = self.hessians([unit])
        amax = InputMaxima([unit] if self.wants_amax else [])

        def see(unit: Unit, x: Tensor) -> None:
            hessians[unit].add(x)
            if amax.units:
                amax.add(unit, x)

        with self.watching([unit], see):
            for i, row in enumerate(self.rows):
                hidden = self.hidden.get(i)
                assert hidden is not None
                self.model.run_to_head(row, hidden)
                advance((i + 1) / len(self.rows))
        made, records = self.rounded(hessians)
        self.save(_HEAD, made, amax, records, start)

    def watching(
        self, units: Sequence[Unit], see: Callable[[Unit, Tensor], None]
    ) -> AbstractContextManager[None]:
        """Hands the inputs of each unit to `see` while texts run."""
        linears = {unit: self.model.linear(unit.modules[0]) for unit in units}
        return watching(linears, self.rotation, see)

    def hessians(self, units: Sequence[Unit]) -> dict[Unit, HessianSum]:
        """Empty sums, small ones first, so that the largest is factorised when it is alone."""
        widths = {unit: self.plan.quantised[unit.modules[0]].shape[1] for unit in units}
        return {
            unit: HessianSum(widths[unit], name=unit.name, device=self.model.device)
            for unit in sorted(units, key=lambda unit: widths[unit])
        }

    def rounded(
        self, hessians: dict[Unit, HessianSum]
    ) -> tuple[dict[str, NVFP4Tensor], list[dict[str, Any]]]:
        """Rounds the weights of all units; takes the sums out of `hessians` one by one."""
        made: dict[str, NVFP4Tensor] = {}
        records = []
        for unit in list(hessians):
            factor = factorise(hessians.pop(unit), self.damping)
            records.append(_record(unit, factor))
            parts = [self.plan.quantised[module] for module in unit.modules]
            weight = torch.cat([self.plan.tensors.get(info.name) for info in parts])
            self.plan.tensors.close()
            weight = rotated(weight.to(self.model.device), self.rotation)
            first = unit.modules[0]
            scale = global_scale_from_amax(self.maxima[first], unit.name)
            whole = quantize_gptq(weight, factor, global_scale=scale, name=unit.name).to("cpu")
            sizes = [info.shape[0] for info in parts]
            for module, codes, block_scale in zip(
                unit.modules, whole.codes.split(sizes), whole.block_scale.split(sizes), strict=True
            ):
                made[module] = NVFP4Tensor(
                    codes.clone(), block_scale.clone(), whole.global_scale.clone()
                )
        return made, records

    def put_back(self, module: str, tensor: NVFP4Tensor) -> None:
        """Gives a layer its quantised weights, turned back for inputs that are not rotated."""
        weight = rotated(tensor.to(self.model.device).dequantize(), self.rotation)
        linear = self.model.linear(module)
        linear.weight = nn.Parameter(weight.to(linear.weight.dtype), requires_grad=False)

    def save(
        self,
        part: str,
        made: Mapping[str, NVFP4Tensor],
        amax: InputMaxima,
        records: list[dict[str, Any]],
        start: float,
    ) -> None:
        tensors = {
            f"{module}.{field}": getattr(tensor, field)
            for module, tensor in made.items()
            for field in _FIELDS
        }
        for unit, value in amax.result().items():
            tensors |= {f"{module}.{_AMAX}": value.clone() for module in unit.modules}
        self.work.save(part, tensors, {"inputs": records, "seconds": time.monotonic() - start})


def _advance(progress: Progress, part: str, done: int, total: int, share: float) -> None:
    progress(part, done + share, total)


def _part(index: int) -> str:
    return f"{index:05d}"


def _stored(work: WorkFolder, part: str, module: str) -> NVFP4Tensor:
    return NVFP4Tensor(*(work.tensor(part, f"{module}.{field}") for field in _FIELDS))


def _record(unit: Unit, factor: HessianFactor) -> dict[str, Any]:
    """What the report says of a unit."""
    return {
        "modules": list(unit.modules),
        "tokens": factor.tokens,
        "damping": factor.damping,
        "singular": factor.is_singular,
        "dead_inputs": factor.dead_inputs,
        "rounded_to_nearest": factor.upper is None,
    }
