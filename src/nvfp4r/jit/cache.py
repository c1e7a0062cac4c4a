"""Compiled kernels on disk, found again by the content that they were made from.

A file is written aside and renamed, so that processes may start at once: each compiles for itself,
the last one stays, and all are alike. What cannot be written is compiled in memory; what was
damaged is compiled again. Old files are never removed: deleting the folder is safe at any time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from nvfp4r.jit.arch import Target
from nvfp4r.jit.compile import Cubin, compile_cubin, compile_options, nvrtc_version
from nvfp4r.jit.sources import ENTRY, kernel_sources

FOLDER_VARIABLE = "NVFP4R_CACHE_DIR"
_SEAL_BYTES = hashlib.sha256().digest_size  # end each file: the hash of all that stands before
_log = logging.getLogger(__name__)


def cubin_for(target: Target, options: Sequence[str] = ()) -> bytes:
    """The kernels of this package for `target`: from the disk if possible, else compiled.

    `options` are further ones of the compiler.

    Raises:
        CompileError: NVRTC refuses the sources.
        ImportError: NVRTC or its Python bindings are missing.
        FileNotFoundError: the installation lacks the CUDA sources.
    """
    return cached_cubin(target, kernel_sources(), ENTRY, options, folder=cache_folder())


def cache_folder() -> Path | None:
    """Where compiled kernels are kept: $NVFP4R_CACHE_DIR, else nvfp4r in the user's cache folder.

    None if there is no home folder to keep them in.
    """
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(os.path.expanduser(chosen))
    user_cache = os.environ.get("XDG_CACHE_HOME", "")
    if Path(user_cache).is_absolute():  # the XDG specification ignores relative ones
        return Path(user_cache, "nvfp4r")
    try:
        return Path.home() / ".cache" / "nvfp4r"
    except RuntimeError:
        return None


def cached_cubin(
    target: Target,
    sources: Mapping[str, str],
    entry: str,
    options: Sequence[str] = (),
    *,
    folder: Path | None,
) -> bytes:
    """What `compile_cubin` makes of the arguments, kept in `folder`.

    The file is named by target and content: sources, options and NVRTC's version. Beside it lies a
    `.log`: the command, then what the compiler said.

    Args:
        folder: made if need be; None, or one that cannot be used, costs a warning and a
            compilation in every process.

    Raises:
        CompileError, ImportError, ValueError: as `compile_cubin`.
    """
    if folder is None:
        _warn_unkept(f"there is no home folder, and {FOLDER_VARIABLE} is not set")
        return compile_cubin(target, sources, entry, options).data
    key = _content_key(target, sources, entry, options)
    path = folder / f"{target.sm}-{key[:32]}.cubin"
    kept = _read(path)
    if kept is not None:
        return kept
    cubin = compile_cubin(target, sources, entry, options)
    _keep(path, cubin)
    return cubin.data


def _content_key(
    target: Target, sources: Mapping[str, str], entry: str, options: Sequence[str]
) -> str:
    major, minor = nvrtc_version()
    parts = [f"{major}.{minor}", entry, *compile_options(target, options)]
    for name in sorted(sources):
        parts += [name, sources[name]]
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))  # so that no two lists read the same
        digest.update(data)
    return digest.hexdigest()


def _read(path: Path) -> bytes | None:
    """The kept machine code; None if there is none that can be used."""
    try:
        blob = path.read_bytes()
    except OSError:
        return None  # if it is more than absent, keeping the new one will tell
    data, seal = blob[:-_SEAL_BYTES], blob[-_SEAL_BYTES:]
    if data and hashlib.sha256(data).digest() == seal:
        return data
    _log.warning("%s: the file is damaged; compiling its kernels again", path)
    return None


def _keep(path: Path, cubin: Cubin) -> None:
    """Writes the log, then the machine code, so that none is seen without its log."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path.with_suffix(".log"), f"{cubin.command}\n{cubin.log}\n".encode())
        replace_file(path, cubin.data + hashlib.sha256(cubin.data).digest())
    except OSError as error:
        _warn_unkept(f"{path.parent}: {error.strerror or error}")


def replace_file(path: Path, blob: bytes) -> None:
    """Writes a file aside and renames it, so that nobody sees half of it."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        aside.write_bytes(blob)
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise


def _warn_unkept(reason: str) -> None:
    _log.warning(
        "compiled CUDA kernels cannot be kept (%s), so every process compiles them anew; set %s to "
        "a folder that can be written",
        reason,
        FOLDER_VARIABLE,
    )
