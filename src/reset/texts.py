"""Texts from a file or a hub data set: problems to decode, or texts to run a model over.

Knows no model, no tokenizer and no score.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

_QUESTIONS = ("problem", "question", "prompt")
_ANSWERS = ("solution", "answer")


def read_problems(
    source: str, count: int, *, leave_out: Callable[[str], bool] = lambda _: False
) -> list[str]:
    """The first `count` problems of `source`, without their answers.

    Args:
        source: a .txt file (problems separated by blank lines), a .jsonl file (one object a line,
            with "problem", "question" or "prompt"), or a hub data set with such a field: NAME,
            NAME:CONFIG or NAME:CONFIG:SPLIT, split "train" by default.
        count: how many, >= 1.
        leave_out: true for a problem that is passed over.

    Raises:
        ValueError: fewer problems than asked for, a record without such a field, a line that is not
            JSON, or a file of another kind. Names file and line.
        OSError: no such file, or the data set cannot be fetched.
        ImportError: a hub data set without the `eval` extra.
    """
    problems = _first(source, count, _problem, leave_out)
    if len(problems) < count:
        raise ValueError(
            f"{source}: holds {len(problems)} problems, but {count} were asked for; ask for fewer "
            "(--num-problems), or add some"
        )
    return problems


def read_texts(source: str, count: int) -> list[str]:
    """The first `count` texts of `source`, or all of them if there are fewer.

    Problems come with their answers if they have any, as the answers hold most of the tokens that a
    model sees in use.

    Args:
        source: as for `read_problems`; an object may instead have "text", and beside a problem
            "solution" or "answer".
        count: how many at most, >= 1.

    Raises:
        ValueError, OSError, ImportError: as `read_problems`; no text at all.
    """
    texts = _first(source, count, _text)
    if not texts:
        raise ValueError(f"{source}: holds no text, need at least one")
    return texts


def _first(
    source: str,
    count: int,
    text_of: Callable[[Any, str], str],
    leave_out: Callable[[str], bool] = lambda _: False,
) -> list[str]:
    """At most `count` texts; `text_of` takes a record and what errors call it."""
    if count < 1:
        raise ValueError(f"{source}: {count} texts asked for, need at least 1")
    path = Path(source)
    if path.suffix == ".txt":
        found = _paragraphs(path)
    elif path.suffix == ".jsonl":
        found = (text_of(record, where) for record, where in _json_lines(path))
    elif path.exists():
        raise ValueError(f"{source}: need a .txt or .jsonl file, or the name of a hub data set")
    else:
        found = (text_of(record, where) for record, where in hub_rows(source))
    return list(islice((text for text in found if not leave_out(text)), count))


def _problem(record: Any, where: str) -> str:
    if question := _field(record, _QUESTIONS):
        return question
    raise ValueError(f"{where}: has no problem, need an object with {_listed(_QUESTIONS)}")


def _text(record: Any, where: str) -> str:
    if text := _field(record, ("text",)):
        return text
    if question := _field(record, _QUESTIONS):
        return "\n\n".join(part for part in (question, _field(record, _ANSWERS)) if part)
    raise ValueError(
        f'{where}: has no text, need an object with "text", or with {_listed(_QUESTIONS)} and '
        f"optionally {_listed(_ANSWERS)}"
    )


def _field(record: Any, names: Iterable[str]) -> str:
    """The first of these fields that holds a text; "" if none does."""
    values = (record.get(name) for name in names) if isinstance(record, dict) else ()
    return next((value for value in values if isinstance(value, str) and value.strip()), "")


def _listed(names: tuple[str, ...]) -> str:
    """'"a", "b" or "c"'."""
    quoted = [f'"{name}"' for name in names]
    return ", ".join(quoted[:-1]) + f" or {quoted[-1]}"


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text ({error}); convert it") from error


def _json_lines(path: Path) -> Iterator[tuple[Any, str]]:
    """Every line's value, and file and line for messages; empty lines are skipped."""
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: is not JSON ({error}), need one object a line") from None
        yield record, where


def _paragraphs(path: Path) -> Iterator[str]:
    paragraph: list[str] = []
    for line in _lines(path):
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "".join(paragraph).strip()
            paragraph = []
    if paragraph:
        yield "".join(paragraph).strip()


def hub_rows(source: str) -> Iterator[tuple[Any, str]]:
    """The rows of a hub data set as they come, each with its place; nothing is stored.

    Args:
        source: NAME, NAME:CONFIG or NAME:CONFIG:SPLIT, split "train" by default.

    Raises:
        ImportError: without the `eval` extra.
        OSError: the data set cannot be fetched.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"{source}: is no file, and a hub data set needs the package datasets; install it "
            "with: pip install 'reset-decoding[eval]'"
        ) from error
    name, _, rest = source.partition(":")
    config, _, split = rest.partition(":")
    try:
        rows = load_dataset(name, config or None, split=split or "train", streaming=True)
    except OSError as error:
        raise OSError(
            f"{source}: is no .txt or .jsonl file here, and no hub data set of this name could be "
            f"fetched ({error}); check the name and the network, or give a local file"
        ) from error
    for number, record in enumerate(rows):
        yield record, f"{source}, record {number}"
