"""Which of several plans is the fastest, and whether by enough to replace the rule's.

Knows no GPU: what measures a plan, and what checks its result, are given.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nvfp4r.plan import Plan

MIN_GAIN = 0.03
"""Share of the rule's time that a plan must save to replace it: above the noise of a repetition."""

_REPETITIONS = 3

Plans = tuple[Plan, ...]
"""One way to share the work, as a plan for each M that is measured."""


@dataclass(frozen=True)
class Verdict:
    """What tuning found.

    Attributes:
        best: the fastest plans that are right, whether or not they are kept; None if there were no
            others than the rule's.
        best_us, default_us: theirs and the rule's, each the median of the repeated measurement, in
            microseconds summed over the M measured; 0.0 without `best`.
        tried: how many candidates were measured.
        wrong: candidates that were refused for a wrong result.
    """

    best: Plans | None
    best_us: float
    default_us: float
    tried: int
    wrong: tuple[Plans, ...]

    @property
    def gain(self) -> float:
        """Share of the rule's time that the best plans save; negative if they lose."""
        return 1 - self.best_us / self.default_us if self.best else 0.0

    @property
    def is_kept(self) -> bool:
        return self.best is not None and self.best_us <= (1 - MIN_GAIN) * self.default_us


def tune(
    default: Plans,
    candidates: Sequence[Plans],
    *,
    can_run: Callable[[Plans], bool],
    is_right: Callable[[Plans], bool],
    measure: Callable[[Plans], float],
    advance: Callable[[], None] = lambda: None,
) -> Verdict:
    """Measures every candidate, then the fastest against the rule's plans once more.

    Args:
        default: what the rule chooses.
        candidates: other ways; the rule's own may be among them.
        can_run: whether the GPU can run every plan of a way; else it is left out.
        is_right: whether every plan of a way gives the right result; asked before it is timed.
        measure: microseconds of a way, summed over its plans.
        advance: called after each candidate.
    """
    timed: list[tuple[float, Plans]] = []
    wrong: list[Plans] = []
    usual = [plan.split for plan in default]
    for plans in candidates:
        if [plan.split for plan in plans] != usual and can_run(plans):
            if is_right(plans):
                timed.append((measure(plans), plans))
            else:
                wrong.append(plans)
        advance()
    if not timed:
        return Verdict(None, 0.0, 0.0, 0, tuple(wrong))
    _, best = min(timed, key=lambda entry: entry[0])
    # In turns, so that a change of clocks meets both.
    pairs = [(measure(default), measure(best)) for _ in range(_REPETITIONS)]
    default_us, best_us = (statistics.median(times) for times in zip(*pairs, strict=True))
    return Verdict(best, best_us, default_us, len(timed), tuple(wrong))
