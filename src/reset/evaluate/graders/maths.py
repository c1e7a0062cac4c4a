r"""Mathematical answers: a thin rule for plain numbers, math-verify for everything else.

The rule takes the dress off a number that models put into a box (`n = 42`, `42^\circ`,
`1{,}234`, `\textbf{42}`, `42\text{ cm}`, `033`) and compares exactly. Whatever it does not
recognise (`\frac{84}{2}`, `2\sqrt{3}`, sets, intervals) goes to math-verify, in a process of its
own: evaluating an expression can take for ever or all memory, and its time limit needs a main
thread. Knows no task.
"""

from __future__ import annotations

import importlib.util
import json
import re
import selectors
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

from reset.evaluate.graders.boxes import final_answer
from reset.evaluate.graders.verdict import UNPARSED, Grade
from reset.evaluate.problems import Answer, Problem

_SCRIPT = Path(__file__).with_name("maths_worker.py")
_SECONDS = 20.0  # math-verify's own limits are 5 s for parsing and 5 s for comparing
_STARTING_SECONDS = 120.0
_MEMORY_BYTES = 4 << 30
_LONGEST = 2_000  # characters; longer "answers" are runaway text

_FONT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|mbox|bm|boldsymbol)"
    r"\s*\{([^{}]*)\}(\^\{?[0-9]\}?)?"
)
_SPACE = re.compile(r"\\[,;:! ]|\\q?quad(?![a-zA-Z])|~")
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])|°")
_NAMED = re.compile(r"[^,=<>]*?[A-Za-z][^,=<>]*=\s*")
_GROUPED = re.compile(r"([+-]?[0-9]{1,3})((?:(?:\{,\}|,| )[0-9]{3})+)(?![0-9])")
_NUMBER = re.compile(r"([+-]?)\s*([0-9]{1,100})(?:\.([0-9]{0,100}))?\.?")


class MathsGrader:
    """Compares answers with the right ones. Close it, or use it as a context: it holds a process.

    The process starts with the first comparison that needs math-verify. May be used from any
    thread; comparisons that need it then wait for each other.
    """

    def __init__(self) -> None:
        self._worker: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> MathsGrader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def grade(self, answer: Answer, problem: Problem) -> Grade:
        """Whether the final answer of `answer` equals `problem.answer`.

        Raises:
            ValueError: an "integer" problem whose answer is none.
            ImportError: math-verify is needed and missing.
        """
        right = plain_number(problem.answer)
        if problem.kind == "integer" and (right is None or right.denominator != 1):
            raise ValueError(f"problem {problem.id}: the answer is {problem.answer!r}, no integer")
        extracted = final_answer(answer.text)
        if extracted is None:
            return UNPARSED
        if len(extracted) > _LONGEST:
            return Grade(False, extracted, f"longer than {_LONGEST} characters")
        given = plain_number(extracted)
        if right is not None and given is not None:
            return Grade(given == right, extracted, f"right is {problem.answer}")
        equal, detail = self._verify(problem.answer, extracted)
        return Grade(equal, extracted, detail)

    def close(self) -> None:
        """Ends the process, if there is one."""
        with self._lock:
            self._stop()

    def _verify(self, right: str, given: str) -> tuple[bool, str]:
        with self._lock:
            worker = self._worker or self._start()
            assert worker.stdin is not None
            worker.stdin.write(json.dumps({"right": right, "given": given}) + "\n")
            worker.stdin.flush()
            reply = _reply(worker, _SECONDS)
            if reply is None:
                self._stop()
                return False, "math-verify: took too long or too much memory, so not equal"
        equal = bool(reply["equal"])
        return equal, f"math-verify: {'equal' if equal else 'not equal'}"

    def _start(self) -> subprocess.Popen[str]:
        require_math_verify()
        worker = subprocess.Popen(
            [sys.executable, str(_SCRIPT), str(_MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._worker = worker
        if _reply(worker, _STARTING_SECONDS) is None:
            self._stop()
            raise ImportError(
                "math-verify is installed but does not start; try: python -c 'import math_verify'"
            )
        return worker

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            with self._worker:
                self._worker = None


def require_math_verify() -> None:
    """Raises ImportError, with what to do, if math-verify is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError(
            "mathematical answers are compared by math-verify, which is missing; install it with: "
            "pip install 'reset-decoding[eval]'"
        )


def plain_number(text: str) -> Fraction | None:
    r"""The number that `text` is once fonts, units, `n =` and separators are off; None if more.

    Digits in groups of three may be separated by commas, `{,}` or spaces; a unit counts as one only
    in a text font. A percent sign is left on, for math-verify to judge.
    """
    bare = text.replace("−", "-").replace(r"\$", "").replace("$", "")
    for mark in (r"\(", r"\)", r"\[", r"\]", r"\displaystyle", r"\left", r"\right"):
        bare = bare.replace(mark, "")
    bare = _FONT.sub(_unwrapped, _SPACE.sub(" ", bare))
    bare = _DEGREES.sub("", bare).strip()
    named = _NAMED.match(bare)
    if named:
        bare = bare[named.end() :].strip()
    while bare[:1] + bare[-1:] in ("()", "{}") and len(bare) > 2:
        bare = bare[1:-1].strip()
    grouped = _GROUPED.fullmatch(bare.partition(".")[0])
    if grouped:
        bare = grouped[1] + re.sub(r"[^0-9]", "", grouped[2]) + bare[grouped.end() :]
    number = _NUMBER.fullmatch(bare)
    if number is None:
        return None
    sign, whole, decimals = number.groups()
    return Fraction(f"{sign}{whole}.{decimals or '0'}")


def _unwrapped(font: re.Match[str]) -> str:
    """Numbers and brackets in a text font stay; words in one are a unit, with its power."""
    content, power = font[1], font[2] or ""
    is_words = re.search(r"[A-Za-z]", content) and not re.search(r"[0-9]", content)
    return "" if is_words else content + power


def _reply(worker: subprocess.Popen[str], seconds: float) -> dict[str, Any] | None:
    """The next line of the worker; None if it ends or stays silent."""
    assert worker.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(worker.stdout, selectors.EVENT_READ)
        if not selector.select(seconds):
            return None
    line = worker.stdout.readline()
    return json.loads(line) if line else None
