"""The tasks: which problems, from where, and what a record of each source means.

Every problem of a task is checked before a model is loaded. Knows no prompt, no engine, no grade.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from reset.calibrate import text_sha256
from reset.evaluate.graders.hidden_tests import load_tests
from reset.evaluate.graders.target import target_answer
from reset.evaluate.problems import Problem
from reset.evaluate.prompts import LETTERS
from reset.evaluate.records import HubSource, Record, file_records, hub_records

IdRule = Literal["file", "content"]
_QUESTIONS = ("problem", "question", "prompt")
OR = " or "
"""Between the answers of an "integer" problem that has several right ones."""

_INTEGER = re.compile(r"-?\d{1,100}")
_KINDS = ("maths", "integer", "choice", "code", "target")
_CODE_FIELDS = ("public_test_cases", "private_test_cases", "metadata", "starter_code")


@dataclass(frozen=True)
class Task:
    """Problems to score a model on, and where they came from.

    `sha256` is over every field of every problem but its place: two scores are of one task only if
    it agrees.
    `expected` is how many problems the task is known to have, None if any number will do.
    """

    name: str
    problems: tuple[Problem, ...]
    sources: tuple[str, ...]
    expected: int | None
    max_tokens: int

    @property
    def sha256(self) -> str:
        fields = [{**asdict(problem), "source": ""} for problem in self.problems]
        lines = [json.dumps(one, sort_keys=True) for one in fields]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class _Plan:
    """How a task is made: its hub sources, its reader of one record, its size and token limit."""

    sources: tuple[HubSource, ...]
    read: Callable[[dict[str, Any], str], Problem]
    expected: int | None
    max_tokens: int


def load_task(
    name: str,
    data: Sequence[Path] = (),
    *,
    max_problems: int | None = None,
    ids: IdRule = "file",
    hub: Callable[[HubSource], Iterable[Record]] = hub_records,
) -> Task:
    """The problems of a task, from files or from the hub.

    Args:
        name: one of `TASKS`.
        data: .jsonl files that stand for the hub's; needed for "jsonl".
        max_problems: keep the first so many.
        ids: task "jsonl" only: take the records' own "id" (a record without one is named by its
            place), or name each problem by its content.
        hub: reads a hub data set.

    Raises:
        ValueError: no such task, no problems, a missing or wrong field, the same id or the same
            problem twice. Names file and line.
        OSError, ImportError: as `file_records` and `hub_records`.
    """
    if name not in _PLANS:
        raise ValueError(f"task is {name!r}; it must be one of {', '.join(TASKS)}")
    if max_problems is not None and max_problems < 1:
        raise ValueError(f"max_problems is {max_problems}; it must be at least 1")
    plan = _PLANS[name]
    if not data and not plan.sources:
        raise ValueError(f"task {name} needs --data FILE.jsonl: it has no data set of its own")
    problems = _unique(_problems(plan, data, hub, ids))
    if not problems:
        raise ValueError(
            f"task {name}: {', '.join(map(str, data)) or plan.sources} holds no problem; need at "
            "least one"
        )
    if max_problems is not None:
        problems = problems[:max_problems]
    sources = tuple(str(path) for path in data) or tuple(map(str, plan.sources))
    expected = plan.expected
    if expected is not None and max_problems is not None:
        expected = min(expected, max_problems)
    return Task(name, tuple(problems), sources, expected, plan.max_tokens)


def read_problem(task: str, record: dict[str, Any], where: str) -> Problem:
    """One record as task `task` reads it, named by its content.

    Raises:
        ValueError: no such task, or a missing or wrong field; `where` is named.
    """
    if task not in _PLANS:
        raise ValueError(f"task is {task!r}; it must be one of {', '.join(TASKS)}")
    problem = _PLANS[task].read(record, where)
    return replace(problem, id=_content_id("problem", problem.question))


def _problems(
    plan: _Plan,
    data: Sequence[Path],
    hub: Callable[[HubSource], Iterable[Record]],
    ids: IdRule,
) -> Iterator[tuple[Problem, str]]:
    if data:
        records: Iterator[Record] = file_records(data)
    else:
        records = (record for source in plan.sources for record in hub(source))
    for record, where in records:
        problem = plan.read(record, where)
        if plan.read is _any and ids == "content":
            problem = replace(problem, id=_content_id("problem", problem.question))
        yield problem, where


def _unique(problems: Iterable[tuple[Problem, str]]) -> list[Problem]:
    """Refuses a problem that is there twice: it would count twice."""
    places: dict[str, str] = {}
    texts: dict[str, str] = {}
    kept = []
    for problem, where in problems:
        if problem.id in places:
            raise ValueError(
                f"{where}: has the id {problem.id!r} of {places[problem.id]}; every problem needs "
                "its own. Correct the file, or pass --ids content"
            )
        text = text_sha256("\n".join((problem.question, *sorted(problem.choices))))
        if text in texts:
            raise ValueError(f"{where}: is the same problem as {texts[text]}; remove one of them")
        places[problem.id] = texts[text] = where
        kept.append(problem)
    return kept


# ---- what a record means -----------------------------------------------------------------------


def _aime(record: dict[str, Any], where: str) -> Problem:
    # Data sets disagree about ids, and some repeat them: problems are named by their text, so that
    # runs on different copies can be compared.
    question = _text(record, _QUESTIONS, where)
    return Problem(
        id=_content_id("aime", question),
        question=question,
        kind="integer",
        answer=_aime_answer(_text(record, ("answer",), where), where),
        source=where,
    )


def _aime_answer(text: str, where: str) -> str:
    """The integer of "033" or "336^\\circ"; "80 or 81" where a contest accepted two."""
    bare = re.sub(r"\(.*?\)|\^\\circ|\$", "", text).strip()
    parts = _accepted(bare)
    if not parts or not all(0 <= part <= 999 for part in parts):
        raise ValueError(
            f"{where}: the answer is {text!r}, need an integer from 0 to 999; correct the file"
        )
    return OR.join(map(str, parts))


def _accepted(text: str) -> list[int]:
    """The integers of "80", or of "080 or 081"; none if it is something else."""
    parts = [part.strip() for part in text.split(OR)]
    return [int(part) for part in parts] if all(map(_INTEGER.fullmatch, parts)) else []


def _gsm8k(record: dict[str, Any], where: str) -> Problem:
    question = _text(record, ("question",), where)
    _, mark, answer = _text(record, ("answer",), where).rpartition("####")
    number = answer.strip().replace(",", "")
    if not mark or not re.fullmatch(r"-?\d+(\.\d+)?", number):
        raise ValueError(f"{where}: the answer has no number behind ####, as GSM8K's have")
    return Problem(_content_id("gsm8k", question), question, "maths", number, source=where)


def _gpqa(record: dict[str, Any], where: str) -> Problem:
    question = _text(record, ("Question",), where)
    right = _text(record, ("Correct Answer",), where)
    wrong = [_text(record, (f"Incorrect Answer {number}",), where) for number in (1, 2, 3)]
    if right in wrong or len(set(wrong)) < 3:
        raise ValueError(f"{where}: two of the four options are the same")

    def rank(choice: str) -> str:
        # The order comes from the text alone: the same on every machine, in every subset, and each
        # letter is right about equally often.
        return text_sha256(f"{question}\n{choice}")

    choices = sorted([right, *wrong], key=rank)
    return Problem(
        id=_content_id("gpqa", question),
        question=question,
        kind="choice",
        answer=LETTERS[choices.index(right)],
        choices=tuple(choices),
        source=where,
    )


def _livecodebench(record: dict[str, Any], where: str) -> Problem:
    question = _text(record, ("question_content",), where)
    _text(record, ("private_test_cases",), where)  # the public ones alone are too kind
    return _code(_text(record, ("question_id",), where), question, record, where)


def _code(name: str, question: str, record: dict[str, Any], where: str) -> Problem:
    """A code problem whose tests can be read."""
    values = {field: record.get(field) or "" for field in _CODE_FIELDS}
    texts = {
        field: value if isinstance(value, str) else json.dumps(value)
        for field, value in values.items()
    }
    problem = Problem(name, question, "code", "", tests=json.dumps(texts), source=where)
    try:
        load_tests(problem)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return problem


def _any(record: dict[str, Any], where: str) -> Problem:
    question = _text(record, _QUESTIONS, where)
    choices = record.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f'{where}: "choices" must be a list of texts')
    kind = record.get("kind", "choice" if choices else "maths")
    if kind not in _KINDS:
        raise ValueError(f'{where}: "kind" is {kind!r}; it must be one of {", ".join(_KINDS)}')
    if kind == "code":
        return _code(str(record.get("id", where)), question, record, where)
    if kind == "target":
        return _target(str(record.get("id", where)), question, record, where)
    answer, several = _answers(record, where)
    if several and kind == "maths":
        kind = "integer"
    if kind == "choice" and answer not in LETTERS[: len(choices)]:
        raise ValueError(
            f'{where}: "answer" is {answer!r}, need the letter of one of {len(choices)} choices'
        )
    if kind == "integer":
        accepted = _accepted(answer)
        if not accepted:
            raise ValueError(f'{where}: "answer" is {answer!r}, need an integer')
        answer = OR.join(map(str, accepted))
    return Problem(
        id=str(record.get("id", where)),
        question=question,
        kind=kind,
        answer=answer,
        choices=tuple(choices),
        source=where,
    )


def _target(name: str, question: str, record: dict[str, Any], where: str) -> Problem:
    numbers, target = record.get("numbers"), record.get("answer")
    if not isinstance(numbers, list):
        raise ValueError(
            f'{where}: "numbers" is {numbers!r}; a problem of kind target needs the list of the '
            'numbers given, and the one to make of them as "answer"'
        )
    try:
        answer = target_answer(numbers, target)  # type: ignore[arg-type]  # it looks itself
    except (TypeError, ValueError) as error:
        raise ValueError(f'{where}: {error}, in "numbers" and "answer"') from error
    return Problem(name, question, "target", answer, source=where)


def _answers(record: dict[str, Any], where: str) -> tuple[str, bool]:
    """The right answer, and whether there are several: then they are integers, joined by OR.

    Several are a list, or "080 or 081 (both were accepted)" as contests put it. "2 or 3" alone may
    as well mean that both belong to the answer, so it is refused. A number is as good as its text;
    true and false are not.
    """
    value = record.get("answer")
    if isinstance(value, list):
        parts = [_text({"answer": one}, ("answer",), where) for one in value]
        if not parts or not all(map(_INTEGER.fullmatch, parts)):
            raise ValueError(
                f'{where}: "answer" is {value!r}; a list holds every integer that is accepted'
            )
        return OR.join(parts), True
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value), False
    text = _text(record, ("answer",), where)
    bare, _, remark = text.partition("(")
    several = len(_accepted(bare)) > 1
    if several and record.get("kind", "maths") == "maths" and "accepted" not in remark:
        raise ValueError(
            f'{where}: "answer" is {text!r}: if each is right, write a list; if both belong to the '
            "answer, write a set: {...}"
        )
    return (bare.strip(), True) if several else (text, False)


def _text(record: dict[str, Any], names: tuple[str, ...], where: str) -> str:
    for name in names:
        value = record.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str) and value.strip():
            return value.strip()
    wanted = " or ".join(f'"{name}"' for name in names)
    raise ValueError(f"{where}: has no {wanted}; every problem needs it, as a text")


def _content_id(prefix: str, question: str) -> str:
    return f"{prefix}-{text_sha256(question)[:12]}"


# ---- the list -----------------------------------------------------------------------------------

_LONG = 32_768
_SHORT = 4_096
_AIME90 = HubSource("xiaoyuanliu/AIME90")
_AIME25 = HubSource("yentinglin/aime_2025")

# Data sets and limits as the public reference has them, so that scores can be compared.
_PLANS = {
    "aime120": _Plan((_AIME90, _AIME25), _aime, 120, _LONG),
    "aime90": _Plan((_AIME90,), _aime, 90, _LONG),
    "aime25": _Plan((_AIME25,), _aime, 30, _LONG),
    "gpqa_diamond": _Plan((HubSource("Idavidrein/gpqa", "gpqa_diamond"),), _gpqa, 198, _LONG),
    "livecodebench": _Plan(
        (HubSource("livecodebench/code_generation_lite", file="test6.jsonl"),),
        _livecodebench,
        175,
        _LONG,
    ),
    "gsm8k": _Plan((HubSource("openai/gsm8k", "main", "test"),), _gsm8k, 1319, _SHORT),
    "jsonl": _Plan((), _any, None, _SHORT),
}
TASKS = tuple(_PLANS)
