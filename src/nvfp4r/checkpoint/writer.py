"""Writes NVFP4 checkpoints in either dialect, tensor by tensor.

The output folder appears when it is whole: written aside, read back, renamed. Multipliers become
divisors here for the dialect that stores them. This module quantises nothing, and writes only what
the reader would accept: contradictions are refused before or while writing.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import safetensors
import torch
from torch import Tensor

from nvfp4r.atomic import check_target, naming_full_disk, replacing_folder, require_space
from nvfp4r.checkpoint.dialects import (
    CONFIG_FILE,
    CONFIG_KEYS,
    SIDE_FILE,
    TENSOR_NAMES,
    Activations,
    Dialect,
    config_block,
    hf_quant_config,
)
from nvfp4r.checkpoint.reader import load_checkpoint
from nvfp4r.checkpoint.shard_writer import ShardWriter, write_json
from nvfp4r.checkpoint.structure import KV_SCALES, is_embedding
from nvfp4r.format import NVFP4Tensor
from nvfp4r.groups import check_exclusions, matches_any
from nvfp4r.methods.rotation import Rotation
from nvfp4r.quantize import divisor_for
from nvfp4r.transforms import stored_matrix

_log = logging.getLogger(__name__)

# A matrix of this many values or more must not take more bits per value, or it is not NVFP4.
_BUDGET_BITS = 4.6
_BUDGET_MIN_VALUES = 1 << 16

_WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"),
    *(".onnx_data", ".ot", ".npz", ".index.json"),
)


@dataclass(frozen=True)
class SaveReport:
    """What `save_checkpoint` wrote.

    Attributes:
        path: the checkpoint folder.
        files: its safetensors files, in order.
        modules: number of quantised modules.
        tensor_bytes: bytes of all tensors.
        bits_per_parameter: of the quantised modules together; None without any.
        inexact_divisors: scales that have no exact divisor, so that they read back changed by one
            unit in the last place; always 0 for ModelOpt.
    """

    path: Path
    files: tuple[str, ...]
    modules: int
    tensor_bytes: int
    bits_per_parameter: float | None
    inexact_divisors: int


def save_checkpoint(
    path: str | Path,
    tensors: Iterable[tuple[str, Tensor | NVFP4Tensor]],
    *,
    config: Mapping[str, Any],
    dialect: Dialect = "modelopt",
    activations: Activations = "none",
    exclude: Sequence[str] = (),
    input_scales: Mapping[str, Tensor] | None = None,
    producer_details: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 4 << 30,
    copy_from: str | Path | None = None,
    force: bool = False,
    expected_bytes: int | None = None,
    rotation: Rotation | None = None,
) -> SaveReport:
    """Writes a checkpoint that loaders of the chosen dialect read.

    Tensors are taken one by one; at most one shard of them is held. There is no way to describe a
    quantised KV cache, so its scales are refused.

    Args:
        path: output folder; its parent must exist.
        tensors: parameter name and tensor; quantised ones are named "<module>.weight". A model with
            tied embeddings simply has no lm_head among them.
        config: the model's config.json; a quantisation block in it is replaced.
        dialect: "modelopt" or "compressed-tensors".
        activations: "nvfp4" writes W4A4 and needs `input_scales`; "none" writes W4A16.
        exclude: patterns of modules that are not quantised; must cover every 2-D weight that is
            not one, embeddings aside.
        input_scales: module to float32 [], a multiplier > 0; exactly the quantised modules.
        producer_details: recorded beside the versions of this package, torch and safetensors.
        max_shard_bytes: tensor bytes per file.
        copy_from: folder of the original model, whose tokenizer, generation config and other files
            are copied (not weights, config.json or hidden files).
        force: replace an existing checkpoint, once the new one is whole.
        expected_bytes: size of the tensors if known; the disk is then checked first.
        rotation: of the quantised weights, and of the inputs that they expect; a matter of
            compressed-tensors alone. A rotated matrix does not show it: what comes from a rotated
            checkpoint needs that checkpoint's `rotation` here.

    Returns:
        What was written.

    Raises:
        ValueError: an argument or tensor does not fit (see above), the output exists or overlaps
            the input, or the result does not read back.
        TypeError: a tensor is of the wrong type, or config or details cannot be written as JSON.
        OSError: the disk is full; the message has the path and the bytes needed.

        Whatever is raised, KeyboardInterrupt included, no partial output stays and an old one is
        untouched.
    """
    path = Path(path)
    source = None if copy_from is None else Path(copy_from)
    for value, allowed in (
        (dialect, get_args(Dialect)),
        (activations, get_args(Activations)),
        (rotation, (None, *get_args(Rotation))),
    ):
        if value not in allowed:
            raise ValueError(f"{path}: got {value!r}, need one of {', '.join(map(str, allowed))}")
    if (activations == "nvfp4") != (input_scales is not None):
        raise ValueError(
            f"{path}: activations={activations!r} with"
            f"{'out' if input_scales is None else ''} input_scales; "
            "W4A4 needs one per quantised module, W4A16 has none"
        )
    producer = {**(producer_details or {}), **_producer()}
    block = config_block(dialect, activations, exclude, producer, rotation)
    check_target(path, marker=CONFIG_FILE, force=force, source=source)
    side_files = [] if source is None else _side_files(source)
    if expected_bytes is not None:
        require_space(path, expected_bytes + sum(file.stat().st_size for file, _ in side_files))

    documents = {
        CONFIG_FILE: {
            **{key: value for key, value in config.items() if key not in CONFIG_KEYS},
            CONFIG_KEYS[0]: block,
        }
    }
    if dialect == "modelopt":
        documents[SIDE_FILE] = hf_quant_config(activations, exclude, producer)
    _require_json(documents, path)

    with replacing_folder(path) as partial:
        shards = ShardWriter(partial, path, max_shard_bytes)
        writer = _TensorWriter(shards, dialect, exclude, input_scales, rotation)
        for name, tensor in tensors:
            writer.add(name, tensor)
        writer.check_complete()
        files = shards.finish()
        for name, document in documents.items():
            write_json(partial / name, document, path)
        for file, relative in side_files:
            with naming_full_disk(path, file.stat().st_size, str(relative)):
                (partial / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, partial / relative)
        bits = _read_back(partial, path, writer.written)
    if writer.inexact:
        _log.warning(
            "%s: %d scales, first %s, have no exact float32 divisor and were moved by one unit in "
            "the last place; the modelopt dialect keeps them as they are",
            path,
            len(writer.inexact),
            writer.inexact[0],
        )
    return SaveReport(
        path, files, len(writer.modules), shards.total_bytes, bits, len(writer.inexact)
    )


class _TensorWriter:
    """Turns parameters into the stored tensors of a dialect and hands them on.

    Attributes:
        written: parameter name to (shape, bytes of a plain tensor or None if quantised).
        modules: quantised modules so far.
        inexact: names of scales that a divisor cannot hold exactly.
    """

    def __init__(
        self,
        shards: ShardWriter,
        dialect: Dialect,
        exclude: Sequence[str],
        input_scales: Mapping[str, Tensor] | None,
        rotation: Rotation | None,
    ) -> None:
        self._shards = shards
        self._rotation = rotation
        self._names = TENSOR_NAMES[dialect]
        self._exclude = exclude
        self._input_scales = input_scales
        self.written: dict[str, tuple[tuple[int, ...], int | None]] = {}
        self.modules: list[str] = []
        self.inexact: list[str] = []

    def add(self, name: str, tensor: Tensor | NVFP4Tensor) -> None:
        if isinstance(tensor, NVFP4Tensor):
            self._shards.add(self._quantised(name, tensor))
            self.written[name] = (tensor.shape, None)
            return
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, need a Tensor or NVFP4Tensor")
        if name.rpartition(".")[2] in KV_SCALES:
            raise ValueError(
                f"{name}: scales of a quantised KV cache cannot be described in the configuration "
                "that is written; leave them out"
            )
        module = name.removesuffix(".weight")
        if module != name and tensor.ndim == 2 and not is_embedding(module):
            self._require_excluded(module, tensor)
        self._shards.add({name: tensor})
        self.written[name] = (tuple(tensor.shape), tensor.nbytes)

    def check_complete(self) -> None:
        """After the last tensor: scales without a module, groups that are half excluded."""
        unused = sorted(set(self._input_scales or ()) - set(self.modules))
        if unused:
            raise ValueError(
                f"input_scales has {unused[0]} ({len(unused)} such), which is no quantised module "
                "of this checkpoint; need exactly the modules that were given as NVFP4Tensor"
            )
        matrices = [name for name, (shape, _) in self.written.items() if len(shape) == 2]
        modules = [name.removesuffix(".weight") for name in matrices if name.endswith(".weight")]
        check_exclusions(modules, self._exclude)

    def _require_excluded(self, module: str, tensor: Tensor) -> None:
        if not matches_any(module, self._exclude):
            raise ValueError(
                f"{module}.weight is {tensor.dtype} {list(tensor.shape)} and not in the exclusion "
                "list, so loaders would take it for quantised; add it to exclude, or quantise it"
            )

    def _quantised(self, name: str, tensor: NVFP4Tensor) -> dict[str, Tensor]:
        module = name.removesuffix(".weight")
        if module == name:
            raise ValueError(f"{name}: a quantised parameter must be named <module>.weight")
        if matches_any(module, self._exclude):
            raise ValueError(
                f"{name} is quantised, but the exclusion list covers {module}; "
                "remove the pattern, or write the layer unquantised"
            )
        if tensor.global_scale.ndim:
            raise ValueError(
                f"{name}: global_scale has shape {list(tensor.global_scale.shape)}, need []; "
                "write the parts of a fused layer one by one"
            )
        tensor.validate(name)
        stored = {
            f"{module}.{self._names.codes}": tensor.codes,
            f"{module}.{self._names.block_scale}": tensor.block_scale,
        }
        scales = {f"{module}.{self._names.global_scale}": tensor.global_scale}
        if self._input_scales is not None:
            if module not in self._input_scales:
                raise ValueError(
                    f"input_scales has no {module}, need one for every quantised module; "
                    "calibrate it, or write W4A16 (activations='none')"
                )
            scales[f"{module}.{self._names.input_scale}"] = self._input_scales[module]
        for key, scale in scales.items():
            stored[key] = self._stored_scale(key, scale).reshape(self._names.scalar_shape)
        if self._rotation is not None:
            stored |= stored_matrix(module)
        self.modules.append(module)
        return stored

    def _stored_scale(self, key: str, multiplier: Tensor) -> Tensor:
        if multiplier.dtype != torch.float32 or multiplier.ndim:
            raise ValueError(
                f"{key}: got {multiplier.dtype} {list(multiplier.shape)}, need one float32 value []"
            )
        if not (torch.isfinite(multiplier) and multiplier > 0):
            raise ValueError(f"{key} is {float(multiplier)}, need a finite multiplier > 0")
        if not self._names.stores_divisors:
            return multiplier
        divisor = divisor_for(multiplier)
        if divisor is None:
            self.inexact.append(key)
            divisor = 1.0 / multiplier
        if not (torch.isfinite(divisor) and torch.isfinite(1.0 / divisor)):
            raise ValueError(
                f"{key}: the multiplier {float(multiplier)} has no finite float32 divisor; "
                "write the modelopt dialect"
            )
        return divisor


def _side_files(source: Path) -> list[tuple[Path, Path]]:
    """Files to copy along: (file, path relative to `source`)."""
    if not source.is_dir():
        raise ValueError(f"{source}: no such folder to copy tokenizer and other files from")
    found = []
    for folder, subfolders, names in os.walk(source):
        subfolders[:] = sorted(name for name in subfolders if name[0] != ".")
        for name in sorted(names):
            relative = (Path(folder) / name).relative_to(source)
            is_config = str(relative) in (CONFIG_FILE, SIDE_FILE)
            is_weight = name.endswith(_WEIGHT_SUFFIXES)
            if name[0] != "." and not is_config and not is_weight:
                found.append((source / relative, relative))
    return found


def _require_json(documents: Mapping[str, Any], path: Path) -> None:
    try:
        json.dumps(documents)
    except TypeError as error:
        raise TypeError(
            f"{path}: config or producer_details cannot be written as JSON ({error}); "
            "use plain dicts, lists, strings and numbers"
        ) from error


def _producer() -> dict[str, str]:
    from nvfp4r import __version__  # the package imports this module

    return {
        "name": "reset-decoding",
        "version": __version__,
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
    }


def _read_back(
    partial: Path, path: Path, written: Mapping[str, tuple[tuple[int, ...], int | None]]
) -> float | None:
    """Opens what was written and compares it; returns the bits per quantised parameter."""
    try:
        checkpoint = load_checkpoint(partial)
    except ValueError as error:
        reason = str(error).replace(str(partial), str(path))
        raise ValueError(f"{path}: what was written does not read back: {reason}") from error
    if set(checkpoint.names()) != set(written):
        missing = sorted(set(checkpoint.names()) ^ set(written))
        raise ValueError(f"{path}: what was written does not read back: {missing[0]} differs")
    quantised_bytes = values = 0
    for name, (shape, plain_bytes) in written.items():
        info = checkpoint.info(name)
        size = info.nbytes if plain_bytes is None else plain_bytes
        if info.shape != shape or info.nbytes != size:
            raise ValueError(
                f"{path}: {name} was written as {list(shape)} ({size} bytes), "
                f"but reads back as {list(info.shape)} ({info.nbytes} bytes)"
            )
        if plain_bytes is None:
            count = shape[0] * shape[1]
            bits = 8 * info.nbytes / count
            if count >= _BUDGET_MIN_VALUES and not (info.dtype == "NVFP4" and bits <= _BUDGET_BITS):
                raise ValueError(
                    f"{path}: {name} takes {bits:.2f} bits per parameter as {info.dtype}, "
                    f"need NVFP4 and at most {_BUDGET_BITS}"
                )
            quantised_bytes += info.nbytes
            values += count
    return 8 * quantised_bytes / values if values else None
