"""Reads NVFP4 checkpoints of either dialect, tensor by tensor.

Opening reads configuration, headers and the scalar scales, and refuses whatever does not fit
together; codes and block scales are read and checked when they are taken. Divisors become
multipliers here, so nothing behind this module knows about dialects.

It does not write (writer.py), does not know what the model computes, and applies no KV-cache scale.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4r.checkpoint.dialects import (
    CONFIG_FILE,
    CONFIG_KEYS,
    TENSOR_NAMES,
    Activations,
    Dialect,
    QuantConfig,
    read_config,
    read_json,
)
from nvfp4r.checkpoint.shards import ShardedTensors, TensorInfo
from nvfp4r.checkpoint.structure import ModuleTensors, sort_tensors
from nvfp4r.format import NVFP4Tensor
from nvfp4r.methods.rotation import Rotation
from nvfp4r.transforms import is_stored_matrix

_log = logging.getLogger(__name__)

_CAN_BE_INFINITE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class ParameterInfo:
    """What is known of a parameter without reading it.

    Attributes:
        shape: of the matrix itself, [N, K] for quantised ones.
        dtype: "NVFP4", or the safetensors code ("BF16", ...).
        nbytes: stored bytes, all scales included.
        file: where its weight or codes are.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: Path


class NVFP4Checkpoint:
    """A checkpoint folder, opened by `load_checkpoint`.

    Attributes:
        path: the folder.
        config: the model's config.json without the quantisation block.
        quant: what the configuration files say about the quantisation.
        dialect: "modelopt" or "compressed-tensors".
        activations: "nvfp4" (W4A4: every module has an input scale) or "none" (W4A16).
        rotation: of the inputs of quantised modules, whose weights are stored rotated; None for
            plain NVFP4.
        exclude: patterns of modules that stay unquantised, as stored.
        modules: names of the quantised modules, sorted.
        kv_scales: KV-cache scales by tensor name, of those that are one number; nothing here
            applies them.
    """

    def __init__(self, path: Path, config: dict[str, Any], quant: QuantConfig) -> None:
        self.path = path
        self.config = config
        self.quant = quant
        self.dialect: Dialect = quant.dialect
        self.rotation: Rotation | None = quant.rotation
        self.exclude = quant.exclude
        self._shards = ShardedTensors(path)
        structure = sort_tensors(self._shards.infos, quant, self._shards.unreadable)
        self.activations: Activations = structure.activations
        self._parameters = structure.parameters
        self._problems = [*self._shards.problems, *structure.problems]
        self._doubtful = structure.doubtful
        self._multipliers = self._read_scales()
        self.modules = tuple(
            sorted(
                name.removesuffix(".weight")
                for name, stored in self._parameters.items()
                if isinstance(stored, ModuleTensors)
            )
        )
        self.kv_scales = {
            info.name: float(self._shards.get(info.name))
            for info in structure.kv_scales
            if math.prod(info.shape) == 1
        }
        for info in structure.matrices:
            if not is_stored_matrix(self._shards.get(info.name)):
                self._problems.append(
                    f"{info.file}: {info.name} is not the Hadamard matrix of 1 and -1 in "
                    "Sylvester's order, as its transform says; other rotations are not supported, "
                    "quantise the original model with reset-quantize"
                )
        self._shards.close()
        if structure.unused_input_scales:
            _log.info(
                "%s: weights alone are quantised; the input scales of %d modules are not used",
                path,
                structure.unused_input_scales,
            )

    def _read_scales(self) -> dict[str, Tensor]:
        """Reads every global and input scale, as a multiplier; drops modules with a bad one."""
        owners: dict[str, str] = {}
        for name, stored in self._parameters.items():
            if isinstance(stored, ModuleTensors):
                owners[stored.global_scale.name] = name
                if stored.input_scale is not None:
                    owners[stored.input_scale.name] = name
        names = TENSOR_NAMES[self.dialect]
        kind = "divisor" if names.stores_divisors else "multiplier"
        multipliers = {}
        for info in self._shards.infos.values():  # file order: every shard is opened once
            if info.name not in owners:
                continue
            value = self._shards.get(info.name).reshape(())
            multiplier = 1.0 / value if names.stores_divisors else value.clone()
            if all(torch.isfinite(x) and x > 0 for x in (value, multiplier)):
                multipliers[info.name] = multiplier
            else:
                self._problems.append(
                    f"{info.file}: {info.name} is {float(value)}, need a finite {kind} > 0 "
                    "with a finite reciprocal; the export is damaged, quantise the layer again"
                )
                self._parameters.pop(owners[info.name], None)
        return multipliers

    def names(self) -> tuple[str, ...]:
        """Parameter names in file order, quantised ones as "<module>.weight".

        Scales are no parameters, whether of weights, inputs or the KV cache.
        """
        return tuple(self._parameters)

    def info(self, name: str) -> ParameterInfo:
        """Shape, dtype and size of a parameter, from the headers.

        Raises:
            KeyError: no such parameter.
        """
        stored = self._stored(name)
        if isinstance(stored, TensorInfo):
            return ParameterInfo(stored.shape, stored.dtype, stored.nbytes, stored.file)
        parts = (stored.codes, stored.block_scale, stored.global_scale)
        N, half_K = stored.codes.shape
        return ParameterInfo(
            (N, 2 * half_K), "NVFP4", sum(part.nbytes for part in parts), stored.codes.file
        )

    def __getitem__(self, name: str) -> NVFP4Tensor | Tensor:
        """Reads one parameter; a quantised one comes validated.

        Raises:
            KeyError: no such parameter.
            ValueError: a block scale is NaN, negative, or zero over non-zero codes, or the file is
                damaged; names tensor and file.
        """
        stored = self._stored(name)
        if isinstance(stored, TensorInfo):
            return self._shards.get(stored.name)
        tensor = NVFP4Tensor(
            self._shards.get(stored.codes.name),
            self._shards.get(stored.block_scale.name),
            self._multipliers[stored.global_scale.name],
        )
        return tensor.validate(f"{stored.block_scale.file}: {name}")

    def items(self) -> Iterator[tuple[str, NVFP4Tensor | Tensor]]:
        """Every parameter in file order, read when its turn comes, one file open at a time."""
        for name in self._parameters:
            yield name, self[name]
        self._shards.close()

    def input_scale(self, module: str) -> Tensor | None:
        """The activation scale of a quantised module: float32 [], a multiplier; None in W4A16.

        Raises:
            KeyError: not a quantised module.
        """
        stored = self._parameters.get(f"{module}.weight")
        if not isinstance(stored, ModuleTensors):
            raise KeyError(f"{self.path}: {module} is not a quantised module")
        return self._multipliers[stored.input_scale.name] if stored.input_scale else None

    def require_sound(self) -> None:
        """Raises ValueError for the first structural problem, if there is one."""
        self._raise_first(self._problems)

    def require_sound_scales(self) -> None:
        """Raises ValueError for the first problem with files, scales or fused layers.

        Layers that the configuration calls quantised and that have no scales are passed over: an
        engine may know better which ones it quantises.
        """
        self._raise_first([line for line in self._problems if line not in self._doubtful])

    def _raise_first(self, problems: list[str]) -> None:
        if problems:
            more = len(problems) - 1
            rest = f" ({more} more: `nvfp4r inspect {self.path}` lists them)" if more else ""
            raise ValueError(problems[0] + rest)

    def problems(self) -> list[str]:
        """Reads every tensor and lists all that is wrong, one line each; empty if nothing is.

        Besides what `load_checkpoint` refuses, this covers the content: bad block scales, and NaN
        or infinite values in tensors that are not quantised.
        """
        found = list(self._problems)
        for name in self._parameters:
            try:
                tensor = self[name]
            except ValueError as error:
                found.append(str(error))
                continue
            if isinstance(tensor, Tensor) and tensor.dtype in _CAN_BE_INFINITE:
                bad = int((~torch.isfinite(tensor)).sum())
                if bad:
                    found.append(
                        f"{self.info(name).file}: {name} holds {bad} NaN or infinite values, "
                        "need finite ones; export the model again"
                    )
        self._shards.close()
        return found

    def _stored(self, name: str) -> TensorInfo | ModuleTensors:
        if name not in self._parameters:
            raise KeyError(f"{self.path}: no parameter {name}")
        return self._parameters[name]


def load_checkpoint(path: str | Path, *, check: bool = True) -> NVFP4Checkpoint:
    """Opens a checkpoint folder without reading its weights.

    Args:
        path: folder with config.json and safetensors files, in either dialect.
        check: False opens a damaged checkpoint too, for `NVFP4Checkpoint.problems`; modules that
            are damaged are then no parameters.

    Raises:
        ValueError: the folder is not an NVFP4 checkpoint (what was found, what is supported), or
            it is damaged or contradicts itself. The first problem is told in full, naming tensor,
            file and remedy, with the number of further ones.

    Example:
        >>> checkpoint = load_checkpoint("Qwen3-8B-NVFP4")      # doctest: +SKIP
        >>> for name, tensor in checkpoint.items():             # doctest: +SKIP
        ...     print(name, tuple(tensor.shape))
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(
            f"{path}: no such folder; need the local folder of a checkpoint, with {CONFIG_FILE} "
            "and safetensors files"
        )
    config = {k: v for k, v in read_json(path / CONFIG_FILE).items() if k not in CONFIG_KEYS}
    checkpoint = NVFP4Checkpoint(path, config, read_config(path))
    if check:
        checkpoint.require_sound()
    return checkpoint
