"""Preset files: what `reset-calibrate` writes and `--preset` reads.

A file holds one calibration, an object with "config", or several by name:

    {"presets": {"my-8b-w4a4": {"config": {...}, ...}, "my-8b-w4a16": {...}}}

Knows JSON and where an entry is; what its values mean is config.py's business.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from reset.files import check_file_target, written_aside

_SEVERAL = "presets"


def split_preset(text: str) -> tuple[Path, str | None] | None:
    """File and name of "FILE" or "FILE:NAME"; None if there is no such file."""
    if Path(text).is_file():
        return Path(text), None
    file, colon, name = text.rpartition(":")
    return (Path(file), name) if colon and name and Path(file).is_file() else None


def read_entry(path: Path, name: str | None = None) -> dict[str, Any]:
    """The calibration in a file, or the one of this name in a file of several.

    Raises:
        ValueError: not UTF-8 JSON, a key twice, not a preset file, no entry of this name, or no
            name where the file holds several. The message lists the names that are there.
        OSError: no such file.
    """
    content = _read(path)
    where = str(path)
    if name is not None or _SEVERAL in content:
        entries = _entries(path, content)
        listed = ", ".join(entries) or "none"
        if name is None:
            raise ValueError(f"{path} holds presets by name ({listed}); pass {path}:NAME")
        if name not in entries:
            raise ValueError(f"{path} holds no preset {name!r}, but these: {listed}")
        content, where = entries[name], f"{path}: preset {name!r}"
    if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
        raise ValueError(f'{where} has no "config" object; pass a file made by reset-calibrate')
    return content


def has_entry(path: Path, name: str | None = None) -> bool:
    """Whether `read_entry` has something to read.

    Raises:
        ValueError, OSError: as `read_entry`, where there is a file.
    """
    return path.exists() and (name is None or name in _entries(path, _read(path)))


def check_entry_target(path: Path, name: str | None) -> None:
    """Refuses a file that `write_entry` would have to refuse; call it before long work.

    Raises:
        ValueError: as `write_entry`.
        OSError: the file is there and cannot be read.
    """
    check_file_target(path)
    _others(path, name)


def write_entry(path: Path, entry: dict[str, Any], name: str | None = None) -> None:
    """Write a calibration alone, or as the entry `name` beside those that the file holds.

    An entry of the same name, or a calibration that was alone in the file, is replaced. Of two
    processes that write names into one file at the same moment the later one wins.

    Raises:
        ValueError: the name is empty or holds a colon or a control character; the file holds
            something else: several presets and no name was given, one and a name was, or neither.
        OSError: the disk is full; the file is as it was.
    """
    others = _others(path, name)
    content = entry if name is None else {_SEVERAL: {**others, name: entry}}
    with written_aside(path) as partial:
        text = json.dumps(content, indent=2, allow_nan=False)
        partial.write_text(text + "\n", encoding="utf-8")


def used_problems(entry: dict[str, Any]) -> set[str]:
    """sha256 of every problem that a calibration saw, for tau_0 or in its search."""
    search = entry.get("search")
    found = [entry.get("problems"), search.get("problems") if isinstance(search, dict) else None]
    return {one for part in found if isinstance(part, list) for one in part if isinstance(one, str)}


def _others(path: Path, name: str | None) -> dict[str, Any]:
    """The entries that stay when `name` is written."""
    if name is not None and (not name.strip() or ":" in name or not name.isprintable()):
        raise ValueError(f"a preset's name is {name!r}; it needs a letter, and no colon")
    if not path.exists():
        return {}
    content = _read(path)
    if name is not None:
        return _entries(path, content)
    if _SEVERAL in content:
        raise ValueError(
            f"{path} holds presets by name, and they would be lost; give this one a name, or "
            "choose another file"
        )
    if not isinstance(content.get("config"), dict):
        raise ValueError(f"{path} is there and is no preset file; choose another")
    return {}


def _entries(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    entries = content.get(_SEVERAL)
    if not isinstance(entries, dict):
        raise ValueError(f'{path} has no "{_SEVERAL}" object, so it holds no presets by name')
    return entries


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=_once, parse_constant=_no_number
        )
    except RecursionError:
        raise ValueError(f"{path} is nested too deep; pass a reset-calibrate file") from None
    except ValueError as error:  # JSON, UTF-8, or a number of thousands of digits
        raise ValueError(f"{path} is not JSON ({error}); pass a reset-calibrate file") from None
    if not isinstance(content, dict):
        raise ValueError(f'{path} has no "config" object; pass a file made by reset-calibrate')
    return content


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is there twice")
        found[key] = value
    return found
