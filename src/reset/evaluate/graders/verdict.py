"""What a grader says about one answer. Knows no kind of problem."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grade:
    """`extracted` is what was taken for the answer, None if none was found ("unparsed").

    An answer without one is never correct. `detail` says in a few words why.
    """

    correct: bool
    extracted: str | None
    detail: str


UNPARSED = Grade(False, None, "no answer found")
