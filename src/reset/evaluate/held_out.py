"""Problems with answers for a calibration, kept apart from others by the hash of their text.

Knows files and hub data sets; runs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path

from reset.calibrate import text_sha256
from reset.evaluate.graders.maths import plain_number
from reset.evaluate.problems import Problem
from reset.evaluate.records import Record, file_records
from reset.evaluate.tasks import Task, read_problem
from reset.texts import hub_rows


def text_hashes(paths: Sequence[Path]) -> set[str]:
    """sha256 of every text in the records of JSONL files, whatever its field is called.

    Raises:
        ValueError, OSError: as `file_records`.
    """
    return {
        text_sha256(value)
        for record, _ in file_records(paths)
        for value in record.values()
        if isinstance(value, str)
    }


def held_out_task(
    source: str,
    count: int,
    *,
    max_tokens: int,
    apart_from: Collection[str] = (),
    task: str = "jsonl",
) -> Task:
    """The first `count` problems of `source` that can be graded, each once.

    Of a hub data set, rows whose answer is not a plain number are passed over: proofs and the like.

    Args:
        source: a .jsonl file, whose every line has to be a problem of `task`, or a hub data set:
            NAME, NAME:CONFIG or NAME:CONFIG:SPLIT.
        count: how many, >= 1.
        max_tokens: output limit of an answer.
        apart_from: sha256 of texts that must not be among them.
        task: how a record is read.

    Raises:
        ValueError: fewer problems than asked for, or a record without what the task needs; file
            and line are named.
        OSError, ImportError: as `file_records` and `hub_rows`.
    """
    if count < 1:
        raise ValueError(f"{count} problems asked for; need at least 1")
    found = (_file if _is_file(source) else _hub)(source, task)
    problems = tuple(islice(_once(found, set(apart_from)), count))
    if len(problems) < count:
        raise ValueError(
            f"{source}: holds {len(problems)} problems with answers besides those left out, but "
            f"{count} were asked for; ask for fewer, or add some"
        )
    return Task("calibration", problems, (source,), None, max_tokens)


def _is_file(source: str) -> bool:
    path = Path(source)
    if path.suffix == ".jsonl":
        return True
    if path.suffix == ".txt" or path.exists():
        raise ValueError(
            f"{source}: need a .jsonl file with problems and answers, or a hub data set"
        )
    return False


def _file(source: str, task: str) -> Iterator[Problem]:
    for record, where in file_records([Path(source)]):
        yield read_problem(task, record, where)


def _hub(source: str, task: str) -> Iterator[Problem]:
    rows: Iterator[Record] = hub_rows(source)
    for record, where in rows:
        answer = record.get("answer")
        if task != "jsonl" or (isinstance(answer, str) and plain_number(answer) is not None):
            yield read_problem(task, record, where)


def _once(problems: Iterator[Problem], seen: set[str]) -> Iterator[Problem]:
    for problem in problems:
        digest = text_sha256(problem.question)
        if digest not in seen:
            seen.add(digest)
            yield problem
