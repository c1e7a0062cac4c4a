"""Problem texts from a file or a hub data set. Knows no model and no score."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

_FIELDS = ("problem", "question", "prompt")


def read_problems(source: str, count: int) -> list[str]:
    """The first `count` problems of `source`.

    Args:
        source: a .jsonl file (field "problem", "question" or "prompt"), a .txt file (problems
            separated by blank lines), or the name of a hub data set with one of those fields,
            split "train".
        count: how many, >= 1.

    Raises:
        ValueError: fewer problems than asked for, a line that is not such an object, or a file of
            another kind.
        ImportError: a hub data set without the `eval` extra.
    """
    if count < 1:
        raise ValueError(f"{count} problems asked for; at least 1 is needed")
    path = Path(source)
    if path.suffix == ".jsonl":
        rows = _jsonl(path)
    elif path.suffix == ".txt":
        rows = _paragraphs(path)
    elif path.exists():
        raise ValueError(f"{source}: a .jsonl or .txt file is needed, or the name of a data set")
    else:
        rows = _hub(source)
    problems = list(islice(rows, count))
    if len(problems) < count:
        raise ValueError(f"{source} holds {len(problems)} problems, but {count} were asked for")
    return problems


def _field(row: Any, where: str) -> str:
    if isinstance(row, dict):
        for name in _FIELDS:
            if isinstance(row.get(name), str) and row[name].strip():
                return str(row[name])
    raise ValueError(f"{where}: an object with a text field {' or '.join(_FIELDS)} is needed")


def _jsonl(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
            yield _field(row, f"{path}, line {number}")


def _paragraphs(path: Path) -> Iterator[str]:
    for block in path.read_text(encoding="utf-8").split("\n\n"):
        if block.strip():
            yield block.strip()


def _hub(name: str) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"{name} is no file, and reading a hub data set needs the eval extra: "
            "pip install 'reset-decoding[eval]'"
        ) from error
    for number, row in enumerate(load_dataset(name, split="train", streaming=True)):
        yield _field(row, f"{name}, row {number}")
