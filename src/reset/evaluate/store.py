"""What a run leaves on disk, so that it can be killed at any moment and go on.

A run is a folder:

    settings.json   everything that decides the scores; written first, compared when a run goes on
    problems.jsonl  every problem with the prompt that was used
    samples.jsonl   one line a sample, only ever appended to
    scores.json     written at the end; holds no times, so that equal runs give equal bytes
    speed.json      tokens a second and what they were measured over

Knows files and JSON; knows no model and no grade.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from reset.files import written_aside

SETTINGS, PROBLEMS, SAMPLES = "settings.json", "problems.jsonl", "samples.jsonl"
SCORES, SPEED = "scores.json", "speed.json"


class RunFolder:
    """The folder of one run, open for appending; use it in a `with` block.

    Args:
        path: the folder; made if it is not there (its parent must be).
        settings: what decides the scores, plain JSON values.
        problems: one JSON object a problem.
        resume: go on with what the folder holds.

    Raises:
        ValueError: the folder holds a run and `resume` is not set; holds something else; its run
            had other settings (they are named); another process is writing to it; a line of its
            samples is damaged.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        problems: Iterable[dict[str, Any]],
        *,
        resume: bool = False,
    ) -> None:
        check_run_target(path, resume=resume)
        self.path = path
        path.mkdir(exist_ok=True)
        self._descriptor = os.open(path / SAMPLES, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock()
            if (path / SETTINGS).exists():
                _check_same(path, read_settings(path), settings)
            else:
                _write_lines(path / PROBLEMS, problems)
                _write_json(path / SETTINGS, settings)  # last: it marks a run that has begun
            self._drop_torn_line()
            self.samples = read_samples(path)
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, sample: dict[str, Any]) -> None:
        """Add a sample; when this returns it is on the disk.

        Raises:
            OSError: the disk is full, or a limit is reached; the file ends with the sample before.
        """
        line = (json.dumps(sample) + "\n").encode("ascii")
        before = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):  # what is left raises the reason why it was cut
                written += os.write(self._descriptor, line[written:])
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, before)
            raise OSError(
                error.errno,
                f"{self.path / SAMPLES}: cannot take another sample "
                f"({os.strerror(error.errno or 0)}); the {len(self.samples)} samples before are "
                "kept. Make room, then go on with --resume",
            ) from error
        self.samples.append(sample)

    def write_results(self, scores: dict[str, Any], speed: dict[str, Any]) -> None:
        """Write scores.json and speed.json; each is whole or as it was before."""
        _write_json(self.path / SPEED, speed)
        _write_json(self.path / SCORES, scores)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{self.path}: another process is writing to this run; wait for it to end"
            ) from error

    def _drop_torn_line(self) -> None:
        """A kill can leave the beginning of a line behind: its sample was never complete."""
        content = (self.path / SAMPLES).read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(self._descriptor, whole)


def check_run_target(path: Path, *, resume: bool) -> None:
    """Refuses a folder that no run can be written to; nothing is changed.

    Raises:
        ValueError: as `RunFolder`, as far as the settings are not needed.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist; create it first")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path}: is a file; --output needs a folder")
    if (path / SETTINGS).exists():
        if not resume:
            raise ValueError(
                f"{path}: holds a run already; go on with it (--resume), or choose another folder"
            )
    elif path.exists():
        # A kill before the settings were there leaves these at most.
        others = [
            entry.name
            for entry in path.iterdir()
            if entry.name not in (PROBLEMS, SAMPLES) and not entry.name.endswith(".partial")
        ]
        if others:
            raise ValueError(
                f"{path}: holds no run but {others[0]!r}; choose an empty or a new folder"
            )


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a run.

    Raises:
        ValueError: the folder holds no run, or its settings are damaged.
    """
    file = path / SETTINGS
    if not file.exists():
        raise ValueError(f"{path}: holds no {SETTINGS}, so it is no run of reset-run")
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: is damaged ({error}); run again in a new folder") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{file}: is not a JSON object; run again in a new folder")
    return settings


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Every whole sample of a run, in the order in which they came.

    Raises:
        ValueError: a damaged line, or a sample that is there twice; the line is named.
    """
    samples: list[dict[str, Any]] = []
    seen: dict[tuple[str, int], int] = {}
    lines = (path / SAMPLES).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], start=1):  # behind the last newline: torn, or nothing
        where = f"{path / SAMPLES}, line {number}"
        try:
            sample = json.loads(line)
            key = (sample["problem_id"], sample["sample"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{where}: is no sample ({error}); the file was changed by something else. Remove "
                "the line, then go on with --resume"
            ) from None
        if key in seen:
            raise ValueError(f"{where}: is the same sample as line {seen[key]}; remove one of them")
        seen[key] = number
        samples.append(sample)
    return samples


def differences(one: Any, other: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every value in which two settings differ, as (dotted name, one, other)."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            inner = f"{name}.{key}" if name else key
            yield from differences(one.get(key), other.get(key), inner)
    elif one != other:
        yield name, one, other


def _check_same(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    plain = json.loads(json.dumps(new))
    found = [f"{name} was {was!r}, is {now!r}" for name, was, now in differences(old, plain)]
    if found:
        more = f", and {len(found) - 4} more" if len(found) > 4 else ""
        raise ValueError(
            f"{path}: its run had other settings: {'; '.join(found[:4])}{more}. Its samples and "
            "new ones would not belong together: use the same settings, or another folder"
        )


def _write_json(path: Path, value: Any) -> None:
    with written_aside(path) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_lines(path: Path, values: Iterable[dict[str, Any]]) -> None:
    with written_aside(path) as partial, partial.open("w", encoding="utf-8") as stream:
        for value in values:
            stream.write(json.dumps(value) + "\n")
