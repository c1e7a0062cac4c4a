"""Training batches: worked examples packed into rows, made by other processes while one trains.

A row holds whole examples one behind the other, each with its marks, and padding at its end. There
is no mask between the examples of a row: a model learns within minutes to start afresh at the mark
that begins one. Chunk i depends on the seed and i alone, so that the stream is the same however
many processes make it. Knows no model.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lab.pocket_reasoner import tokenizer
from lab.pocket_reasoner.problems import Difficulty, training_example

IGNORED = -100
"""Target of a token that no loss is taken on (torch's default)."""

_INSTRUCTED = 0.1  # share of prompts that ask as `reset-run --prompt task` does


@dataclass(frozen=True)
class Stream:
    """A stream of training rows.

    Args:
        difficulty: of the problems.
        seed: of all that is drawn.
        length: tokens of a row.
        rows: rows of a chunk, which one process makes at a time.
    """

    difficulty: Difficulty
    seed: int
    length: int
    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.length < 2:
            raise ValueError(
                f"chunks of {self.rows} rows of {self.length} tokens; need at least 1 row of 2"
            )


def example_tokens(draw: random.Random, difficulty: Difficulty) -> tuple[list[int], list[int]]:
    """Token ids of one example, and its targets: the next token, or `IGNORED`.

    Loss is taken on the solution and the mark that ends it, not on the question.
    """
    question, worked = training_example(draw, difficulty)
    if draw.random() < _INSTRUCTED:
        question += tokenizer.INSTRUCTION
    prompt = tokenizer.encode_prompt(question)
    learned = [*tokenizer.encode_text(worked), tokenizer.IDS[tokenizer.END]]
    return [*prompt, *learned], [*([IGNORED] * (len(prompt) - 1)), *learned, IGNORED]


def make_chunk(stream: Stream, number: int) -> tuple[NDArray[np.uint8], NDArray[np.int16]]:
    """Chunk `number`: ids [rows, length] and targets [rows, length].

    Raises:
        ValueError: an example does not fit a row.
    """
    draw = random.Random(f"{stream.seed}/{number}")
    ids = np.full((stream.rows, stream.length), tokenizer.IDS[tokenizer.PAD], dtype=np.uint8)
    targets = np.full((stream.rows, stream.length), IGNORED, dtype=np.int16)
    used = [0] * stream.rows
    open_rows = list(range(stream.rows))
    while open_rows:
        example, wanted = example_tokens(draw, stream.difficulty)
        size = len(example)
        if size > stream.length:
            raise ValueError(
                f"an example has {size} tokens, but a row has {stream.length}; make rows longer, "
                "or the problems easier"
            )
        # The first row with room; a row that is refused too often is full.
        row = next((one for one in open_rows if used[one] + size <= stream.length), None)
        if row is None:
            open_rows.pop(0)
            continue
        place = slice(used[row], used[row] + size)
        ids[row, place], targets[row, place] = example, wanted
        used[row] += size
    return ids, targets


def _chunk_of(task: tuple[Stream, int]) -> tuple[NDArray[np.uint8], NDArray[np.int16]]:
    return make_chunk(*task)


@contextmanager
def chunks(
    stream: Stream, count: int, processes: int
) -> Iterator[Iterator[tuple[NDArray[np.uint8], NDArray[np.int16]]]]:
    """Chunks 0 .. count - 1 in order, made ahead by `processes`; by this one if that is 0.

    Raises:
        ValueError: as `make_chunk`.
    """
    tasks = ((stream, number) for number in range(count))
    if processes == 0:
        yield map(_chunk_of, tasks)
        return
    # Not forked: the parent may hold threads and a GPU.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield _ahead(pool, tasks, 4 * processes)


def _ahead(
    pool: multiprocessing.pool.Pool, tasks: Iterator[tuple[Stream, int]], most: int
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int16]]]:
    """Results in order, with at most `most` of them under way: what waits takes memory."""
    pending = []
    for task in tasks:
        pending.append(pool.apply_async(_chunk_of, (task,)))
        if len(pending) >= most:
            yield pending.pop(0).get()
    for result in pending:
        yield result.get()
