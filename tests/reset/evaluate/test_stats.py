"""Bootstrap intervals against enumeration, theory and their own coverage."""

import math
from itertools import product

import numpy as np
import pytest

from reset.evaluate.stats import (
    all_differences,
    bootstrap_means,
    estimate,
    paired_difference,
    score_estimate,
    sign_flip_p,
)


def test_bootstrap_means_follow_the_exact_distribution_of_resamples():
    """All 27 resamples of three values are equally likely; the draws meet them within 5 sigma."""
    values = np.array([0.0, 1.0, 5.0])
    exact = [np.mean(picked) for picked in product(values, repeat=3)]
    drawn = bootstrap_means(values, seed=1)
    assert len(drawn) == 10_000
    for value in set(exact):
        share = exact.count(value) / 27
        sigma = math.sqrt(share * (1 - share) / len(drawn))
        assert abs(np.isclose(drawn, value).mean() - share) < 5 * sigma


def test_the_estimate_of_a_normal_sample_is_the_textbook_interval():
    scores = np.random.default_rng(0).normal(0.5, 0.2, 400)
    found = estimate(scores)
    assert found.mean == pytest.approx(scores.mean())
    assert found.standard_error == pytest.approx(scores.std(ddof=1) / 20)
    half = 1.96 * found.standard_error
    assert found.low == pytest.approx(found.mean - half, abs=0.1 * half)
    assert found.high == pytest.approx(found.mean + half, abs=0.1 * half)


def test_intervals_cover_the_truth_as_often_as_they_say():
    """60 problems of chance 0.3: 95 % nominal; of 400 intervals at least 90 % have to hold it."""
    generator = np.random.default_rng(5)
    held = 0
    for _ in range(400):
        scores = (generator.random(60) < 0.3).astype(float)
        means = np.quantile(bootstrap_means(scores, seed=3, resamples=1000), [0.025, 0.975])
        held += means[0] <= 0.3 <= means[1]
    assert 0.90 <= held / 400 <= 0.99


def test_pairing_takes_out_what_problems_have_in_common():
    generator = np.random.default_rng(2)
    hardness = generator.random(100)
    base = np.clip(hardness + generator.normal(0, 0.02, 100), 0, 1)
    other = np.clip(base + 0.03, 0, 1)
    paired = paired_difference(base, other)
    assert paired.low > 0
    assert paired.high - paired.low < 0.1 * (estimate(base).high - estimate(base).low)


def test_equal_seeds_give_equal_intervals_and_a_higher_level_wider_ones():
    scores = np.array([0.0, 0.5, 1.0, 0.25, 0.75])
    assert estimate(scores) == estimate(scores)
    narrow, wide = estimate(scores), estimate(scores, level=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_scores_have_the_exact_interval_and_not_one_of_no_width(value):
    """0 of 12: the largest share under which that still happens in 2.5 of 100 times."""
    found = score_estimate(np.full(12, value))
    reach = found.high if value == 0.0 else 1 - found.low
    assert (1 - reach) ** 12 == pytest.approx(0.025)
    assert {found.low, found.high} >= {value}
    mixed = np.array([0.0, 1.0, 0.0])
    assert score_estimate(mixed) == estimate(mixed)


def test_sign_flips_against_enumeration():
    values = np.array([0.5, 0.25, -0.125, 1.0, 0.25, 0.0, 0.5, -0.25])
    flips = [abs(np.dot(signs, values)) for signs in product([-1, 1], repeat=8)]
    exact = np.mean([flip >= abs(values.sum()) - 1e-12 for flip in flips])
    sigma = math.sqrt(exact * (1 - exact) / 10_000)
    assert abs(sign_flip_p(values) - exact) < 5 * sigma
    assert sign_flip_p(np.zeros(5)) == 1.0


def test_without_a_difference_few_comparisons_seem_to_show_one():
    """Twelve problems, no difference: of 300 comparisons about 5 % fall below 0.05."""
    generator = np.random.default_rng(8)
    below = 0
    for _ in range(300):
        below += sign_flip_p(generator.choice([-1.0, -0.5, 0.0, 0.5, 1.0], 12)) <= 0.05
    assert below / 300 < 0.09


def test_one_problem_has_a_mean_and_nothing_else():
    found = estimate(np.array([0.5]))
    assert found.mean == 0.5
    assert math.isnan(found.standard_error)
    assert math.isnan(found.low)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimate(np.array([])), "need one value a problem"),
        (lambda: estimate(np.zeros((2, 2))), "need one value a problem"),
        (lambda: estimate(np.zeros(3), level=95), "level is 95"),
        (lambda: paired_difference(np.zeros(3), np.zeros(4)), "need the same problems"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- many arms at once --------------------------------------------------------------------------


def exact_p(one, other):
    """Of each pair, adjusted for all: the share of all 2^P flips whose largest |t| is as large."""
    pairs = np.array([a - b for a in one for b in other])

    def t(values):
        error = values.std(axis=-1, ddof=1) / math.sqrt(values.shape[-1])
        return np.abs(values.mean(axis=-1)) / error

    signs = np.array(list(product([-1.0, 1.0], repeat=pairs.shape[1])))
    largest = t(signs[:, None, :] * pairs).max(axis=1)
    return np.array([(largest >= value - 1e-9).mean() for value in t(pairs)])


@pytest.mark.parametrize("seed", range(6))
def test_an_interval_leaves_0_out_where_the_exact_adjusted_test_shows_a_difference(seed):
    """Three arms against two on ten problems: all 1,024 flips are counted."""
    generator = np.random.default_rng(seed)
    one = generator.uniform(0, 1, (3, 10)) * [[1.0], [0.6], [1.0]]
    other = one[:2] - generator.uniform(-0.2, 0.5, (2, 10))
    p = exact_p(one, other)
    assert np.abs(p - 0.05).min() > 0.003, "too near the level for 10,000 random flips to agree"
    found = all_differences(one, other)
    shown = (found.low > 0) | (found.high < 0)
    assert shown.ravel().tolist() == (p < 0.05).tolist()
    assert found.mean == pytest.approx(one.mean(axis=1)[:, None] - other.mean(axis=1))
    assert found.mean - found.low == pytest.approx(found.high - found.mean)


def test_the_exact_tests_of_these_seeds_show_some_pairs_and_not_others():
    generator = np.random.default_rng(0)
    one = generator.uniform(0, 1, (3, 10)) * [[1.0], [0.6], [1.0]]
    p = exact_p(one, one[:2] - generator.uniform(-0.2, 0.5, (2, 10)))
    assert 0 < (p < 0.05).sum() < 6


def test_all_intervals_hold_together():
    """Twenty-four pairs with different truths; a pair's own interval would fail far more often."""
    generator = np.random.default_rng(2)
    truth = np.linspace(-0.1, 0.1, 10)
    missed = missed_alone = 0
    for seed in range(150):
        base = generator.uniform(0.2, 0.8, 50)
        scores = generator.binomial(4, (base + truth[:, None])) / 4
        found = all_differences(scores[:6], scores[6:], seed=seed, flips=999)
        true = truth[:6, None] - truth[6:]
        missed += bool(((found.low > true) | (found.high < true)).any())
        pairs = scores[:6, None] - scores[6:]
        error = pairs.std(axis=2, ddof=1) / math.sqrt(50)
        missed_alone += bool((np.abs(pairs.mean(axis=2) - true) > 1.96 * error).any())
    assert missed <= 0.05 * 150 + 5  # two standard errors of that count
    assert missed_alone > 0.3 * 150


def test_arms_that_never_differ_may_still_differ_elsewhere():
    """Exact: with 30 problems alike, a share up to 1 - 0.05^(1/30) of others may differ."""
    scores = np.eye(3, 30)[:1]
    found = all_differences(scores, scores)
    assert found.mean.tolist() == [[0.0]]
    assert found.high[0, 0] == pytest.approx(1 - 0.05 ** (1 / 30))
    assert found.low[0, 0] == -found.high[0, 0]


@pytest.mark.parametrize("problems", [1, 4])
def test_a_handful_of_problems_shows_nothing_however_large_the_difference_is(problems):
    found = all_differences(np.ones((2, problems)), np.zeros((1, problems)))
    assert found.low.tolist() == [[-1.0], [-1.0]]
    assert found.high.tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize(
    ("one", "other", "level", "message"),
    [
        (np.ones((2, 3)), np.ones((2, 4)), 0.95, r"shapes \(2, 3\) and \(2, 4\)"),
        (np.ones(3), np.ones((2, 3)), 0.95, r"need \[A, P\], \[B, P\]"),
        (np.ones((0, 3)), np.ones((2, 3)), 0.95, "need at least one"),
        (np.ones((1, 0)), np.ones((1, 0)), 0.95, "need at least one"),
        (np.ones((1, 3)), np.ones((1, 3)), 1.0, "level is 1.0"),
    ],
)
def test_scores_that_cannot_be_compared(one, other, level, message):
    with pytest.raises(ValueError, match=message):
        all_differences(one, other, level=level)
