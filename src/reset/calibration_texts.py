"""Texts that a quantiser runs a model over, as token ids.

From a file or a hub data set; questions come with their answers if they have any, as the answers
hold most of the tokens that a model sees in use. This module knows no model, only a tokenizer's
call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_QUESTIONS = ("question", "problem")
_ANSWERS = ("answer", "solution")


def read_texts(source: str, count: int) -> list[str]:
    """The first `count` texts of `source`, or all of them if there are fewer.

    Args:
        source: a .txt file (texts separated by blank lines), a .jsonl file (one object a line with
            "text", or with "question" or "problem" and optionally "answer" or "solution"), or a hub
            data set with such fields: NAME, NAME:CONFIG or NAME:CONFIG:SPLIT, split "train" by
            default.
        count: how many at most, >= 1.

    Raises:
        ValueError: no text at all, a record without such a field, a line that is not JSON, or a
            file of another kind. Names file and line.
        OSError: no such file, or the data set cannot be fetched.
        ImportError: a hub data set without the `eval` extra.
    """
    if count < 1:
        raise ValueError(f"--calib-samples is {count}, need at least 1")
    path = Path(source)
    if path.suffix == ".jsonl":
        texts = _jsonl_texts(path)
    elif path.suffix == ".txt":
        texts = _paragraphs(path)
    elif path.exists():
        raise ValueError(f"{source}: need a .txt or .jsonl file, or the name of a hub data set")
    else:
        texts = _hub_texts(source)
    found = list(islice(texts, count))
    if not found:
        raise ValueError(f"{source}: holds no text, need at least one")
    return found


def token_rows(texts: Iterable[str], tokenizer: Any, max_tokens: int) -> list[Tensor]:
    """Token ids of every text, [T] int64 each, cut after `max_tokens`; empty ones left out.

    Raises:
        ValueError: `max_tokens` is below 1, or no text gives a token.
    """
    if max_tokens < 1:
        raise ValueError(f"--calib-tokens is {max_tokens}, need at least 1")
    rows = []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=max_tokens)["input_ids"]
        if len(ids):
            rows.append(torch.tensor(ids, dtype=torch.int64))
    if not rows:
        raise ValueError("the calibration texts give no token, need at least one; use longer texts")
    return rows


def _text_of(record: Any, where: str) -> str:
    def field(names: Iterable[str]) -> str:
        values = (record.get(name) for name in names)
        return next((value for value in values if isinstance(value, str) and value.strip()), "")

    if isinstance(record, dict):
        text, question = field(["text"]), field(_QUESTIONS)
        if text or question:
            return text or "\n\n".join(part for part in (question, field(_ANSWERS)) if part)
    raise ValueError(
        f'{where}: has no text, need an object with "text", or with "question" or "problem" and '
        'optionally "answer" or "solution"'
    )


def _jsonl_texts(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{where}: is not JSON ({error}), need one object a line"
                ) from None
            yield _text_of(record, where)


def _paragraphs(path: Path) -> Iterator[str]:
    paragraph: list[str] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                paragraph.append(line)
            elif paragraph:
                yield "".join(paragraph).strip()
                paragraph = []
    if paragraph:
        yield "".join(paragraph).strip()


def _hub_texts(source: str) -> Iterator[str]:
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
        yield _text_of(record, f"{source}, record {number}")
