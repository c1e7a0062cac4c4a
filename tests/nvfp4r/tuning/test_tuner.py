"""The choice among measured plans, with a measurement that is told what to say."""

import pytest

from nvfp4r.plan import Plan, SmallSplit
from nvfp4r.tuning.tuner import MIN_GAIN, tune


def plan(warps: int, grid: int = 1) -> Plan:
    split = SmallSplit(warps, grid)
    return Plan("small", f"w{warps}", grid, 32, 2, 0, False, "", split=split)


RULE = (plan(8),)
OTHERS = [(plan(4),), (plan(12),), (plan(8, 2),)]


class Clock:
    """Says a time for each kernel and grid; a list is worn down, its last time stays."""

    def __init__(self, **times):
        self.times = {name: list(value) for name, value in times.items()}
        self.asked = []

    def __call__(self, plans):
        name = "+".join(f"{plan.kernel}g{plan.grid}" for plan in plans)
        self.asked.append(name)
        left = self.times[name]
        return left.pop(0) if len(left) > 1 else left[0]


def run(clock, candidates=OTHERS, *, can_run=lambda plans: True, is_right=lambda plans: True, **kw):
    return tune(RULE, candidates, can_run=can_run, is_right=is_right, measure=clock, **kw)


def test_the_fastest_is_kept():
    verdict = run(Clock(w8g1=[10.0], w4g1=[9.0], w12g1=[8.0], w8g2=[9.5]))
    assert verdict.best == OTHERS[1]
    assert verdict.is_kept
    assert (verdict.default_us, verdict.best_us, verdict.tried) == (10.0, 8.0, 3)
    assert verdict.gain == pytest.approx(0.2)


@pytest.mark.parametrize(("us", "is_kept"), [(9.8, False), (9.71, False), (9.7, True), (9.6, True)])
def test_a_gain_of_2_percent_is_not_enough_and_3_is(us, is_kept):
    assert MIN_GAIN == 0.03
    verdict = run(Clock(w8g1=[10.0], w4g1=[us], w12g1=[11.0], w8g2=[11.0]))
    assert verdict.best == OTHERS[0]
    assert verdict.is_kept == is_kept


def test_a_lucky_first_time_does_not_win():
    """The repeated measurement alone counts, in turns with the rule's plan."""
    clock = Clock(w8g1=[10.0], w4g1=[5.0, 9.9], w12g1=[9.0], w8g2=[9.5])
    verdict = run(clock)
    assert (verdict.best, verdict.best_us, verdict.is_kept) == (OTHERS[0], 9.9, False)
    assert clock.asked == ["w4g1", "w12g1", "w8g2", *["w8g1", "w4g1"] * 3]


def test_one_slow_repetition_does_not_count():
    clock = Clock(w8g1=[10.0], w4g1=[8.0, 8.0, 20.0, 8.0], w12g1=[9.0], w8g2=[9.0])
    assert run(clock).is_kept


def test_a_wrong_result_is_never_timed():
    clock = Clock(w8g1=[10.0], w4g1=[1.0], w12g1=[8.0], w8g2=[9.0])
    verdict = run(clock, is_right=lambda plans: plans != OTHERS[0])
    assert verdict.wrong == (OTHERS[0],)
    assert verdict.best == OTHERS[1]
    assert "w4g1" not in clock.asked


def test_what_the_gpu_cannot_run_is_left_out():
    checked = []
    verdict = run(
        Clock(w8g1=[10.0], w12g1=[8.0], w8g2=[9.0]),
        can_run=lambda plans: plans != OTHERS[0],
        is_right=lambda plans: checked.append(plans) or True,
    )
    assert (verdict.tried, verdict.wrong) == (2, ())
    assert OTHERS[0] not in checked


@pytest.mark.parametrize("candidates", [[], [RULE]])
def test_the_rule_is_not_measured_against_itself(candidates):
    clock, steps = Clock(), []
    verdict = run(clock, candidates, advance=lambda: steps.append(1))
    assert (verdict.best, verdict.is_kept, verdict.gain, verdict.tried) == (None, False, 0.0, 0)
    assert clock.asked == []
    assert len(steps) == len(candidates)


def test_several_numbers_of_tokens_are_one_way():
    """A plan for each, and one time for them together."""
    rule, other = (plan(8), plan(8, 2)), (plan(4), plan(4, 2))
    verdict = tune(
        rule,
        [rule, other],
        can_run=lambda plans: True,
        is_right=lambda plans: len(plans) == 2,
        measure=Clock(**{"w8g1+w8g2": [20.0], "w4g1+w4g2": [19.0]}),
    )
    assert (verdict.best, verdict.best_us, verdict.is_kept) == (other, 19.0, True)
