"""Graders: whether an answer is right.

    with Grader() as grader:
        grader.check(problems)              # before a model is loaded: is all there that is needed?
        grade = grader.grade(answer, problem)

Each kind of problem has its rule: maths.py ("maths", "integer"), choice.py, target.py, code.py.
Knows no task and no engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from types import TracebackType

from reset.evaluate.graders.choice import grade_choice
from reset.evaluate.graders.code import grade_code
from reset.evaluate.graders.hidden_tests import load_tests
from reset.evaluate.graders.maths import MathsGrader, require_math_verify
from reset.evaluate.graders.sandbox import Limits, SandboxError, run
from reset.evaluate.graders.target import grade_target
from reset.evaluate.graders.verdict import Grade
from reset.evaluate.problems import Answer, Problem

__all__ = ["Grade", "Grader", "Limits", "SandboxError", "grade", "grader_versions"]


class Grader:
    """Grades answers to problems of every kind. Holds a process: close it or use it as a context.

    May be used from several threads; only code is then judged faster.

    Args:
        limits: of the programs that are judged; None for LiveCodeBench's.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits
        self._maths = MathsGrader()

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def check(self, problems: Iterable[Problem]) -> dict[str, bool]:
        """Tries, before anything is generated, what grading `problems` will need.

        Returns:
            For code, what protects this machine (see sandbox.py); else nothing.

        Raises:
            ImportError: math-verify is missing.
            SandboxError: there are no limits for programs here.
            ValueError: a problem's tests cannot be read.
        """
        kinds = set()
        for problem in problems:
            kinds.add(problem.kind)
            if problem.kind == "code":
                load_tests(problem)
        if kinds & {"maths", "integer"}:
            require_math_verify()
        return run("", limits=self._limits).confined if "code" in kinds else {}

    def grade(self, answer: Answer, problem: Problem) -> Grade:
        """Whether `answer` solves `problem`.

        Raises:
            ImportError, SandboxError: as `check`; never a wrong grade instead.
            ValueError: the problem itself is unsound: no right answer, no tests.
        """
        if problem.kind == "choice":
            return grade_choice(answer, problem)
        if problem.kind == "target":
            return grade_target(answer, problem)
        if problem.kind == "code":
            return grade_code(answer, problem, self._limits)
        return self._maths.grade(answer, problem)

    def close(self) -> None:
        self._maths.close()


def grader_versions() -> dict[str, str]:
    """What decides grades beside this package."""
    try:
        return {"math-verify": metadata.version("math-verify")}
    except metadata.PackageNotFoundError:
        return {}  # only tasks that do not need it get this far


def grade(answer: Answer, problem: Problem) -> Grade:
    """One grade; for many, a `Grader` is faster, since it keeps its process. Raises as it does."""
    with Grader() as grader:
        return grader.grade(answer, problem)
