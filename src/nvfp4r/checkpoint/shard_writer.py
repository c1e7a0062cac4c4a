"""Writes a stream of tensors into safetensors shards of bounded size.

Holds one shard at most. How many there will be is known at the end only, so shards get temporary
names and are renamed when the last one is written. Knows nothing of quantisation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nvfp4r.atomic import naming_full_disk
from nvfp4r.checkpoint.shards import INDEX_FILE, SINGLE_FILE


class ShardWriter:
    """Collects tensors and writes them as `model.safetensors`, or as shards with an index.

    Args:
        folder: where the files go.
        target: what errors call the output.
        max_shard_bytes: tensor bytes per shard, >= 1; a larger group gets a shard of its own.

    Raises:
        ValueError: `max_shard_bytes` is below 1.
    """

    def __init__(self, folder: Path, target: Path, max_shard_bytes: int) -> None:
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes is {max_shard_bytes}, need at least 1")
        self._folder = folder
        self._target = target
        self._max_shard_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._storages: set[int] = set()
        self._shards: list[list[str]] = []
        self._names: set[str] = set()
        self.total_bytes = 0

    def add(self, group: Mapping[str, Tensor]) -> None:
        """Takes tensors that belong together; they go into the same shard.

        Args:
            group: tensors by name, on any device; copied only if they must be.

        Raises:
            ValueError: a name was there before.
            OSError: the disk is full; names the output and the bytes needed.
        """
        for name in group:
            if name in self._names:
                raise ValueError(f"{name} was given twice, need every tensor once")
        group_bytes = sum(tensor.nbytes for tensor in group.values())
        if self._pending and self._pending_bytes + group_bytes > self._max_shard_bytes:
            self._flush()
        for name, tensor in group.items():
            tensor = tensor.detach().cpu().contiguous()
            if tensor.untyped_storage().data_ptr() in self._storages:
                tensor = tensor.clone()  # safetensors refuses tensors that share memory
            self._storages.add(tensor.untyped_storage().data_ptr())
            self._pending[name] = tensor
        self._names.update(group)
        self._pending_bytes += group_bytes
        self.total_bytes += group_bytes

    def finish(self) -> tuple[str, ...]:
        """Writes what is left and gives every shard its final name; returns the names in order.

        Raises:
            ValueError: no tensor was given.
            OSError: the disk is full; names the output and the bytes needed.
        """
        if self._pending:
            self._flush()
        count = len(self._shards)
        if count == 0:
            raise ValueError(f"{self._target}: got no tensors, need at least one")
        if count == 1:
            self._temporary(0).rename(self._folder / SINGLE_FILE)
            return (SINGLE_FILE,)
        files = tuple(f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count))
        for i, file in enumerate(files):
            self._temporary(i).rename(self._folder / file)
        index = {
            "metadata": {"total_size": self.total_bytes},
            "weight_map": {
                name: file
                for file, names in zip(files, self._shards, strict=True)
                for name in names
            },
        }
        write_json(self._folder / INDEX_FILE, index, self._target)
        return files

    def _temporary(self, shard: int) -> Path:
        return self._folder / f"shard-{shard:05d}.partial"

    def _flush(self) -> None:
        file = self._temporary(len(self._shards))
        what = f"shard {len(self._shards) + 1}"
        with naming_full_disk(self._target, self._pending_bytes, what), _as_os_error():
            save_file(self._pending, file, metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending = {}
        self._pending_bytes = 0
        self._storages = set()


def write_json(file: Path, content: Mapping[str, object], target: Path) -> None:
    """Writes a JSON object, two spaces deep; a full disk is reported under the name of `target`."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    with naming_full_disk(target, len(text.encode()), file.name):
        file.write_text(text, encoding="utf-8")


@contextmanager
def _as_os_error() -> Iterator[None]:
    """safetensors wraps the system's errors into its own; gives them back their number."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), str(error)) from error
