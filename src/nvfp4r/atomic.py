"""A folder that appears whole or not at all.

Everything is written into a hidden sibling, flushed to the disk and renamed; an old folder is
removed only after the new one has taken its place. This module knows nothing of what is written.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_target(path: Path, *, marker: str, force: bool, source: Path | None = None) -> None:
    """Refuses a target folder that must not be written.

    Args:
        path: the folder that shall appear.
        marker: file that a folder must hold for `force` to replace it, so that a mistyped path
            cannot cost anything but an old result.
        force: replace an existing folder.
        source: the folder that is read meanwhile.

    Raises:
        ValueError: the parent is missing; the target exists (without `force`), is not a folder, is
            a link, or does not look like an old result; source and target overlap.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist; create it first")
    if source is not None:
        target, origin = path.resolve(), source.resolve()
        if target == origin or origin in target.parents or target in origin.parents:
            raise ValueError(
                f"{path}: the output overlaps the input {source}; choose a folder beside it"
            )
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ValueError(f"{path}: exists and is not a folder; choose another output")
    if path.exists():
        if not force:
            raise ValueError(
                f"{path}: exists already; choose another output, or replace it with --force "
                "(force=True)"
            )
        if any(path.iterdir()) and not (path / marker).exists():
            raise ValueError(
                f"{path}: has no {marker}, so it is no checkpoint to be replaced; remove it "
                "yourself, or choose another output"
            )


def require_space(path: Path, needed_bytes: int) -> None:
    """Raises OSError (ENOSPC) if the disk of `path`'s parent has less free than `needed_bytes`."""
    free = shutil.disk_usage(path.parent).free
    if free < needed_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{path}: needs {needed_bytes:,} bytes, but {path.parent} has {free:,} bytes free; "
            "make room, or choose an output on another disk",
        )


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Gives a hidden folder beside `path`, which becomes `path` when the block ends without error.

    On any exception, KeyboardInterrupt included, the hidden folder is removed and `path` is what it
    was before. Call `check_target` first; an existing folder is replaced.
    """
    tag = secrets.token_hex(4)
    partial = path.parent / f".{path.name}.partial-{tag}"
    partial.mkdir()
    try:
        yield partial
        for folder, _, files in os.walk(partial):
            for name in files:
                _flush(Path(folder) / name)
            _flush(Path(folder))
        _swap(partial, path, path.parent / f".{path.name}.old-{tag}")
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _flush(path.parent)


@contextmanager
def naming_full_disk(path: Path, needed_bytes: int, what: str) -> Iterator[None]:
    """Says which path needed how much if the disk, a quota or a file size limit is reached.

    Args:
        path: the output as the user knows it.
        needed_bytes: size of what is being written.
        what: its name.

    Raises:
        OSError: with the errno of the original one.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise OSError(
            error.errno,
            f"{path}: cannot write {what}, which needs {needed_bytes:,} bytes "
            f"({os.strerror(error.errno)}); make room or choose another output. "
            "Nothing was left behind",
        ) from error


def _swap(partial: Path, path: Path, aside: Path) -> None:
    """Renames `partial` to `path`; an old `path` is moved aside and deleted afterwards."""
    if not path.exists():
        partial.rename(path)
        return
    try:
        path.rename(aside)
        partial.rename(path)
    except BaseException:
        if aside.exists() and not path.exists():
            aside.rename(path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
