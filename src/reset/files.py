"""Files that appear only when they are whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A hidden path beside `path` to write to; renamed to `path` if the block raises nothing.

    Raises:
        ValueError: the folder of `path` does not exist, or `path` is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"{target} is a folder; pass the path of a file, e.g. {target / 'trace'}")
    if not target.parent.is_dir():
        raise ValueError(f"{target}: folder {target.parent} does not exist; create it first")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
