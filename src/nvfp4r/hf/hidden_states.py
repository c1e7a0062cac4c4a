"""Hidden states of many texts between two decoder layers: the first in memory, the rest on disk.

The file on disk has no name: the system frees it when it is closed or the process ends, however
that happens. It is read and written, not mapped, so that a full disk is an error that can be told,
and what is on disk does not count as memory of the process.

This module knows tensors by number; it runs no model and changes no value.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

IN_MEMORY_BYTES = 1 << 30
"""What is held in memory: 128 texts of 2,048 tokens at hidden size 2,048 in bfloat16, so models of
1B on a GPU need no disk. At 32B it is a third of what the embedding takes in float32."""

_HOW_TO_NEED_LESS = (
    "make room, take fewer or shorter texts (--calib-samples, --calib-tokens), or choose an output "
    "on another disk"
)


def require_room(folder: Path, hidden_bytes: int, others_bytes: int = 0) -> None:
    """Looks whether the disk of `folder` has room for hidden states.

    Args:
        hidden_bytes: size of all of them, in memory and on disk.
        others_bytes: what else will be written there while they are kept.

    Raises:
        OSError: ENOSPC; says how much is needed. Not if all of them stay in memory.
    """
    on_disk = hidden_bytes - IN_MEMORY_BYTES
    if on_disk <= 0:
        return
    free = shutil.disk_usage(folder).free
    if free < on_disk + others_bytes:
        others = f" and finished layers {others_bytes:,}" if others_bytes else ""
        raise OSError(
            errno.ENOSPC,
            f"{folder}: the calibration texts' hidden states need {on_disk:,} bytes{others}, but "
            f"{folder} has {free:,} bytes free; {_HOW_TO_NEED_LESS}",
        )


@dataclass(frozen=True)
class _Slot:
    """Where a tensor lies in the file."""

    start: int
    shape: torch.Size
    dtype: torch.dtype
    nbytes: int


class HiddenStates:
    """Tensors by the number of their text, `IN_MEMORY_BYTES` of them in memory, others on disk.

    Args:
        folder: whose disk takes them. No file is made before memory is used up.
        device: where `get` puts them.

    Example:
        >>> with HiddenStates(Path(), torch.device("cpu")) as hidden:
        ...     hidden.put(0, torch.ones(1, 2))
        ...     hidden.get(0), hidden.get(1)
        (tensor([[1., 1.]]), None)
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder = folder
        self._device = device
        self._kept: dict[int, Tensor] = {}
        self._kept_bytes = 0
        self._slots: dict[int, _Slot] = {}
        self._end = 0
        self._file: FileIO | None = None

    def __enter__(self) -> HiddenStates:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Gives memory and disk back."""
        self._kept.clear()
        self._slots.clear()
        if self._file is not None:
            self._file.close()

    def get(self, text: int) -> Tensor | None:
        """The last tensor that was put there, bit for bit, on the device; None before the first.

        Raises:
            OSError: the file cannot be read.
        """
        if text in self._kept:
            return self._kept[text].to(self._device)
        slot = self._slots.get(text)
        if slot is None:
            return None
        assert self._file is not None
        content = torch.empty(slot.nbytes, dtype=torch.uint8)
        self._file.seek(slot.start)
        rest = content.numpy().data
        while rest:
            count = self._file.readinto(rest)
            if not count:
                raise OSError(errno.EIO, f"{self._folder}: hidden states on this disk are cut off")
            rest = rest[count:]
        return content.view(slot.dtype).view(slot.shape).to(self._device)

    def put(self, text: int, hidden: Tensor) -> None:
        """Keeps a tensor, made contiguous, in place of the one of the same number.

        Raises:
            OSError: the disk is full or cannot be written; says what for.
        """
        hidden = hidden.detach().cpu().contiguous()
        before = self._kept.pop(text, None)
        if before is not None:
            self._kept_bytes -= before.nbytes
        if self._kept_bytes + hidden.nbytes <= IN_MEMORY_BYTES:
            self._kept[text] = hidden
            self._kept_bytes += hidden.nbytes
            return
        slot = self._slots.get(text)
        start = slot.start if slot is not None and slot.nbytes == hidden.nbytes else self._end
        self._slots[text] = _Slot(start, hidden.shape, hidden.dtype, hidden.nbytes)
        try:
            self._write(start, hidden.view(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self._folder}: cannot write the calibration texts' hidden states to this disk, "
                f"{start + hidden.nbytes:,} bytes so far ({os.strerror(error.errno or 0)}); "
                f"{_HOW_TO_NEED_LESS}. Nothing of them was left behind",
            ) from error
        self._end = max(self._end, start + hidden.nbytes)

    def _write(self, start: int, content: memoryview) -> None:
        if self._file is None:
            # Without a buffer there is nothing to be flushed to a full disk when it is closed.
            self._file = tempfile.TemporaryFile(  # noqa: SIM115  (__exit__ closes it)
                buffering=0, dir=self._folder
            )
        self._file.seek(start)
        while content:
            content = content[self._file.write(content) :]
