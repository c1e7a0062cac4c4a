"""Records of a task: lines of JSONL files, or rows of a hub data set, each with its place.

Knows no task: what a field means is tasks.py's business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = tuple[dict[str, Any], str]
"""A record, and its place for messages: "aime24.jsonl, line 3"."""


@dataclass(frozen=True)
class HubSource:
    """A data set on the hub: `file` if it is one JSONL file of it, else a config and a split."""

    name: str
    config: str | None = None
    split: str = "train"
    file: str | None = None

    def __str__(self) -> str:
        part = self.file or ":".join(filter(None, (self.config, self.split)))
        return f"{self.name}:{part}"


def file_records(paths: Sequence[Path]) -> Iterator[Record]:
    """Every line of the files in turn; empty lines are skipped.

    Raises:
        ValueError: a file that is not .jsonl, not UTF-8, or a line that is not a JSON object; the
            line is named.
        OSError: no such file.
    """
    for path in paths:
        if path.suffix != ".jsonl":
            raise ValueError(f"{path}: need a .jsonl file, one JSON object a line")
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is not UTF-8 text ({error}); convert it") from error
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield _object(line, where), where


def hub_records(source: HubSource) -> Iterator[Record]:
    """Every row of a hub data set.

    Raises:
        ImportError: the package datasets is missing.
        OSError: the data set cannot be fetched, or needs a login.
    """
    if source.file is not None:
        from huggingface_hub import hf_hub_download

        try:
            path = hf_hub_download(source.name, source.file, repo_type="dataset")
        except OSError as error:
            raise OSError(_unreachable(source, error)) from error
        yield from file_records([Path(path)])
        return
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"{source}: a hub data set needs the package datasets; install it with: "
            "pip install 'reset-decoding[eval]', or give the problems with --data"
        ) from error
    try:
        rows = load_dataset(source.name, source.config, split=source.split)
    except OSError as error:
        raise OSError(_unreachable(source, error)) from error
    for number, row in enumerate(rows):
        yield dict(row), f"{source}, row {number}"


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: is not JSON ({error}), need one object a line") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: is a {type(record).__name__}, need a JSON object")
    return record


def _unreachable(source: HubSource, error: OSError) -> str:
    return (
        f"{source}: this data set cannot be fetched from the hub ({error}); check the network, log "
        "in if it asks for that (hf auth login), or give the problems with --data FILE.jsonl"
    )
