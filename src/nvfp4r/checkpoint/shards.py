"""Tensors in one or many safetensors files, read one at a time.

Opening reads the index and the headers; a tensor's bytes are read when it is asked for, with one
file open at a time. This module knows nothing of quantisation: names, dtypes, shapes, bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nvfp4r.checkpoint.dialects import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_SHARD_NAME = re.compile(r"[^/\\\0]+\.safetensors")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its file's header describes it.

    Attributes:
        name: full name.
        dtype: safetensors code, e.g. "BF16", "U8", "F8_E4M3".
        shape: as stored.
        file: the file that holds it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        bits = re.search(r"\d+", self.dtype)  # BOOL, the only code without a number, has 8
        return math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8


class ShardedTensors:
    """All tensors of a checkpoint folder.

    Damage that leaves something to look at (a broken or missing shard, an index that does not fit)
    is collected in `problems`, so that a report can list all of it.

    Attributes:
        infos: every tensor by name, in the order of files and of bytes within a file.
        problems: one line each, naming file, tensor and remedy; empty for a sound checkpoint.
        unreadable: tensors that the index places into a file that cannot be read.

    Args:
        folder: holds `model.safetensors`, or shards and `model.safetensors.index.json`.

    Raises:
        ValueError: no safetensors file, several without an index, or an unusable index.
    """

    def __init__(self, folder: Path) -> None:
        files, weight_map = _plan(folder)
        self.problems: list[str] = []
        self._open_file: Path | None = None
        self._open_handle: Any = None
        holders: dict[str, list[TensorInfo]] = {}
        broken: set[Path] = set()
        for file in files:
            try:
                for info in _headers(file):
                    holders.setdefault(info.name, []).append(info)
            except ValueError as error:
                self.problems.append(str(error))
                broken.add(file)
        self.unreadable = frozenset(
            name for name, file in (weight_map or {}).items() if file in broken
        )
        self.infos = {name: infos[0] for name, infos in holders.items()}
        for name, infos in holders.items():
            if len(infos) > 1:
                places = " and ".join(str(info.file) for info in infos)
                self.problems.append(
                    f"{name} is stored in {places}, need one place; the files are of different "
                    "exports, fetch or write all of them again"
                )
        if weight_map is not None:
            self.problems += _index_problems(folder / INDEX_FILE, weight_map, holders, broken)

    def get(self, name: str) -> Tensor:
        """Reads one tensor; opens its file unless it is the one opened last.

        Raises:
            KeyError: no such tensor.
            ValueError: the file has gone or was damaged since the headers were read.
        """
        file = self.infos[name].file
        with _naming(file):
            if file != self._open_file:
                self.close()
                self._open_handle = safe_open(file, framework="pt")
                self._open_file = file
            return self._open_handle.get_tensor(name)

    def close(self) -> None:
        """Closes the file opened last; tensors already read stay valid."""
        self._open_file = self._open_handle = None


def _plan(folder: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """The files to open, sorted, and the index's map from tensor to file if there is an index."""
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if not index.exists():
        files = sorted(file for file in folder.glob("*.safetensors") if file.name[0] != ".")
        if single in files:
            return [single], None
        if len(files) == 1:
            return files, None
        found = f"{len(files)} safetensors files without {INDEX_FILE}" if files else "none"
        raise ValueError(
            f"{folder}: need {SINGLE_FILE}, or shards and {INDEX_FILE}, found {found}; "
            "fetch the missing files"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map is {weight_map!r}, need an object: tensor to file")
    for name, file in weight_map.items():
        # Also keeps the index from pointing outside the folder.
        if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file):
            raise ValueError(
                f"{index}: places {name} in {file!r}, need the name of a file in this folder; "
                "do not use this checkpoint unless you trust where it comes from"
            )
    files = sorted({folder / file for file in weight_map.values()})
    if single.exists() and single not in files:
        raise ValueError(
            f"{folder}: holds both {SINGLE_FILE} and {INDEX_FILE}, which does not name it; "
            "remove the one that is out of date"
        )
    return files, {name: folder / file for name, file in weight_map.items()}


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Turns what goes wrong with a file into a ValueError that names it."""
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(
            f"{file}: no such file, but the checkpoint needs it; fetch it again"
        ) from error
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file}: cannot be read as a whole safetensors file ({error}); "
            "it is truncated or damaged, fetch or write it again"
        ) from error


def _headers(file: Path) -> list[TensorInfo]:
    with _naming(file), safe_open(file, framework="pt") as handle:
        infos = []
        for name in handle.offset_keys():
            tensor = handle.get_slice(name)
            infos.append(TensorInfo(name, tensor.get_dtype(), tuple(tensor.get_shape()), file))
        return infos


def _index_problems(
    index: Path,
    weight_map: dict[str, Path],
    holders: dict[str, list[TensorInfo]],
    broken: set[Path],
) -> Iterator[str]:
    for name, file in weight_map.items():
        holding = [info.file for info in holders.get(name, [])]
        if file not in holding and file not in broken:
            elsewhere = f"; it is in {holding[0].name}" if holding else ""
            yield (
                f"{index}: places {name} in {file.name}, which does not hold it{elsewhere}; "
                "index and shards are of different exports, fetch or write all of them again"
            )
    for name, infos in holders.items():
        if name not in weight_map:
            yield (
                f"{index}: does not mention {name}, which is in {infos[0].file.name}; "
                "index and shards are of different exports, fetch or write all of them again"
            )
