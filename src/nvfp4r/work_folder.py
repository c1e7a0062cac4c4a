"""Finished parts of a long job on disk, so that the same command goes on where it was ended.

A part is a set of tensors and a record. It is written aside and renamed, so what is there is whole.
The folder appears with the first part and carries the settings of the job; other settings are
refused. This module knows nothing of what the parts mean.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

_SETTINGS_FILE = "settings.json"
_RECORD = "record"  # key of a file's metadata


class WorkFolder:
    """The parts of one job.

    Args:
        path: where they are kept; made when the first part is saved.
        settings: what the parts depend on, by name; values that JSON has.

    Raises:
        ValueError: `path` holds something else, or parts of other settings; names the first one
            that differs.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._settings = json.loads(json.dumps(settings))
        if not path.is_symlink() and not path.exists():
            return
        if path.is_symlink() or not path.is_dir():
            raise ValueError(
                f"{path}: is where finished layers are kept, but it is no folder; move it away"
            )
        if any(path.iterdir()):
            self._check_settings()

    def _check_settings(self) -> None:
        file = self.path / _SETTINGS_FILE
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(
                f"{self.path}: is where finished layers are kept, but it has no readable "
                f"{_SETTINGS_FILE}; move it away"
            ) from error
        for name in (*self._settings, *before):
            old, new = before.get(name), self._settings.get(name)
            if old != new:
                raise ValueError(
                    f"{self.path}: holds finished layers of a command with another {name}: {old}, "
                    f"now {new}. Give the same as before to go on, or remove the folder to start "
                    "again"
                )

    def has(self, part: str) -> bool:
        """Whether a part was finished."""
        return self._file(part).exists()

    def save(self, part: str, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Writes a part; it is there whole or not at all.

        Raises:
            OSError: names the file.
        """
        content = save(dict(tensors), metadata={_RECORD: json.dumps(record)})
        try:
            self.path.mkdir(exist_ok=True)
            settings = self.path / _SETTINGS_FILE
            if not settings.exists():
                _write(settings, (json.dumps(self._settings, indent=2) + "\n").encode())
            _write(self._file(part), content)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self._file(part)}: cannot write {len(content):,} bytes "
                f"({os.strerror(error.errno or 0)}); make room and give the same command again, "
                "which goes on after the layers that are finished",
            ) from error

    def tensor(self, part: str, name: str) -> Tensor:
        """One tensor of a part.

        Raises:
            ValueError: the file cannot be read, or does not hold it; names the file.
        """
        file = self._file(part)
        try:
            with safe_open(file, framework="pt") as handle:
                return handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file}: cannot read {name} ({error}); remove this file and give the same command "
                "again"
            ) from error

    def record(self, part: str) -> dict[str, Any]:
        """The record of a part.

        Raises:
            ValueError: the file cannot be read; names it.
        """
        file = self._file(part)
        try:
            with safe_open(file, framework="pt") as handle:
                return json.loads(handle.metadata()[_RECORD])
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file}: cannot be read ({error}); remove this file and give the same command "
                "again"
            ) from error

    def remove(self) -> None:
        """Deletes the folder and all parts, if it is there."""
        if self.path.exists():
            shutil.rmtree(self.path)

    def _file(self, part: str) -> Path:
        return self.path / f"{part}.safetensors"


def _write(file: Path, content: bytes) -> None:
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)
