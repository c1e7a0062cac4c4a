"""Files that appear only when they are whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_file_target(path: Path) -> None:
    """Refuses a path that no file can be written to; call it before long work, not after.

    Raises:
        ValueError: the folder of `path` does not exist, or `path` is a folder.
    """
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; pass the path of a file, e.g. {path / 'trace'}")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: folder {path.parent} does not exist; create it first")


@contextmanager
def written_aside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A hidden path beside `path` to write to; renamed to `path` if the block raises nothing.

    Raises:
        ValueError: as `check_file_target`.
        OSError: the disk is full, or the folder may not be written to; an old file at `path` is as
            it was.
    """
    target = Path(path)
    check_file_target(target)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(target)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(
            error.errno,
            f"{target}: cannot be written ({os.strerror(error.errno)}); make room, or choose "
            "another place. What was there before is untouched",
        ) from error
    finally:
        partial.unlink(missing_ok=True)
