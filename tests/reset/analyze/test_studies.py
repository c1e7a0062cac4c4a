"""Distribution, steps and estimators against numbers by hand and against slow programs."""

import json
import math

import numpy as np
import pytest

from reset.analyze.distribution import distribution
from reset.analyze.estimators import POSITIONS, estimators
from reset.analyze.replay import positions_in_step, replay, step_means, uncertain_steps
from reset.analyze.steps import step_entropies
from reset.config import ESTIMATORS, ReSETConfig
from tests.reset.analyze.records import answer, dump_of, random_answers
from tests.reset.spec import Request


def test_c3_percentiles_are_pooled_linear_and_come_with_their_origin(tmp_path):
    dump = dump_of(tmp_path / "d", [answer([0.0] * 80), answer([1.0] * 20)])
    study = distribution([dump])
    assert study.summary["p80_nats"] == [0.2]
    assert study.summary["tokens"] == [100]
    content = json.loads(study.to_json())
    assert "linear" in content["rules"]["percentile"]
    source = content["sources"][0]
    for name in ("model_sha256", "quantisation", "data", "versions", "answers"):
        assert source[name], name


def test_the_histogram_counts_every_token_once(tmp_path):
    answers = random_answers(3, [400, 90])
    study = distribution([dump_of(tmp_path / "d", answers)], bin_width_nats=0.25)
    rows = study.tables["histogram"]
    entropies = np.concatenate([one.entropy_nats for one in answers])
    assert sum(row["tokens"] for row in rows) == len(entropies)
    for row in rows:
        inside = (entropies >= row["from_nats"]) & (entropies < row["to_nats"])
        assert row["tokens"] == inside.sum()
    assert rows[-1]["tokens"] > 0


def test_dumps_are_compared_in_the_same_bins(tmp_path):
    dumps = [dump_of(tmp_path / n, random_answers(s, [200])) for s, n in enumerate("ab")]
    rows = distribution(dumps).tables["histogram"]
    edges = [[(r["from_nats"], r["to_nats"]) for r in rows if r["dump"] == d] for d in (0, 1)]
    assert edges[0] == edges[1]


def test_e5_a_collapse_after_a_good_start_is_visible(tmp_path):
    """64 sound tokens, then a loop of five: a check of 16 tokens would see nothing."""
    tokens = [*range(64), *([100, 101, 102, 103, 104] * 80)]
    entropies = [1.0] * 64 + [0.01] * 400
    dump = dump_of(tmp_path / "d", [answer(entropies, tokens=tokens)])
    first, second, third = distribution([dump]).tables["positions"]
    assert (first["from_position"], first["to_position"]) == (0, 63)
    assert (third["from_position"], third["to_position"]) == (256, 463)
    assert first["repeated"] == 0
    assert first["mean_nats"] == 1
    # Five tokens for a round of the loop, seven more until eight in a row have been seen.
    assert second["repeated"] == pytest.approx((192 - 12) / 192, abs=1e-6)
    assert third["repeated"] == 1
    assert third["mean_nats"] == pytest.approx(0.01)


def test_sampler_entropies_have_a_row_of_their_own(tmp_path):
    seen = np.array([0.5, 1.5], dtype=np.float32)
    sampled = {"sampler_entropy_nats": seen, "temperature": seen}
    dump = dump_of(tmp_path / "d", [answer([0.0, 1.0], **sampled)])
    study = distribution([dump])
    means = {row["entropies"]: row["mean_nats"] for row in study.tables["percentiles"]}
    assert means == {"whole sequence": 0.5, "seen by the sampler": 1.0}
    assert study.summary["p80_nats"] == [0.8]


def test_bad_bin_width(tmp_path):
    with pytest.raises(ValueError, match="bin width is 0"):
        distribution([dump_of(tmp_path / "d", [answer([1.0])])], 0)


def test_offline_means_and_positions_by_hand():
    one = answer([1.0, 3.0, 5.0, 0.0, 0.5], [1, 2])
    assert step_means(one).tolist() == [2, 2, 5, 0.25, 0.25]
    assert positions_in_step(one).tolist() == [0, 1, 0, 0, 1]
    assert uncertain_steps(one).tolist() == [True, True, True, False, False]  # mean 1.9


@pytest.mark.parametrize("name", ESTIMATORS)
def test_replay_is_what_the_policy_would_have_done(name):
    answers = random_answers(5, [1, 150, 40])
    configs = [
        ReSETConfig(policy="relative", t_low=1.0, estimator=estimator, window=window)
        for estimator, window in ((name, 8), ("window", 32))
    ]
    replayed = replay(answers, configs)[0]
    for one, estimates in zip(answers, replayed, strict=True):
        request = Request(t_low=1.0, policy="relative", estimator=name, window=8)
        new_step = False
        for position, entropy in enumerate(one.entropy_nats.tolist()):
            token = request.feed(entropy, new_step)
            new_step = bool(one.ends_step[position])
            assert estimates.step_entropy[position] == pytest.approx(token.step_entropy, abs=1e-9)
            assert estimates.mean_entropy[position] == pytest.approx(token.mean_entropy, abs=1e-9)


def test_estimator_errors_against_a_slow_program(tmp_path):
    answers = random_answers(6, [200, 300, 17], share_of_ends=0.02)
    study = estimators(dump_of(tmp_path / "d", answers), window=8)
    errors: dict[tuple[str, int], list[float]] = {}
    for name in ESTIMATORS:
        for one in answers:
            request = Request(t_low=1.0, policy="relative", estimator=name, window=8)
            new_step, place = False, 0
            for position, entropy in enumerate(one.entropy_nats.tolist()):
                estimate = request.feed(entropy, new_step).step_entropy
                place = 0 if new_step else place
                truth = one.entropy_nats[one.step == one.step[position]].mean(dtype=np.float64)
                group = max(start for start in POSITIONS if start <= place)
                errors.setdefault((name, group), []).append(estimate - truth)
                new_step, place = bool(one.ends_step[position]), place + 1
    rows = study.tables["positions"]
    assert {(row["estimator"], row["from_position"]) for row in rows} == set(errors)
    for row in rows:
        mine = errors[row["estimator"], row["from_position"]]
        assert row["tokens"] == len(mine)
        absolute = math.fsum(map(abs, mine)) / len(mine)
        assert row["mean_abs_error_nats"] == pytest.approx(absolute, rel=1e-5, abs=1e-9)
        assert row["bias_nats"] == pytest.approx(math.fsum(mine) / len(mine), rel=1e-5, abs=1e-9)
        rmse = math.sqrt(math.fsum(e * e for e in mine) / len(mine))
        assert row["rmse_nats"] == pytest.approx(rmse, rel=1e-5, abs=1e-9)
    assert all(row["tokens"] == 517 for row in study.tables["overall"])


def test_hybrid_is_the_window_early_and_causal_late(tmp_path):
    """Steps at two levels: the window lags behind, the step's own mean is right at once."""
    entropies = [0.0] * 64 + [2.0] * 64
    study = estimators(dump_of(tmp_path / "d", [answer(entropies, [63])]))
    error = {
        (row["estimator"], row["from_position"]): row["mean_abs_error_nats"]
        for row in study.tables["positions"]
    }
    assert error["causal", 0] == error["causal", 32] == error["hybrid", 32] == 0
    assert error["hybrid", 0] == error["window", 0] == 1.0  # mean of 0 and 2
    assert error["window", 16] == pytest.approx(
        np.mean([2 - 2 * k / 32 for k in range(16, 32)]) / 2
    )
    assert study.summary["smallest_mean_abs_error"] == "causal"


def test_the_window_is_checked(tmp_path):
    with pytest.raises(ValueError, match="window is 0"):
        estimators(dump_of(tmp_path / "d", [answer([1.0])]), window=0)


def test_steps_by_hand(tmp_path):
    """Steps of means 0.5 and 2.0, as many tokens each."""
    one = answer([0.25, 0.75, 0.5, 0.5, 1.0, 3.0, 2.5, 1.5], [3])
    study = step_entropies(dump_of(tmp_path / "d", [one]), tau_0=0.75)
    low, high = study.tables["groups"]
    assert (low["step_mean_nats"], low["tokens"], low["p50_nats"]) == (0.5, 4, 0.5)
    assert (high["step_mean_nats"], high["tokens"], high["p50_nats"]) == (2.0, 4, 2.0)
    assert (low["at_or_above_step"], low["at_or_above_tau_0"]) == (0.75, 0.25)
    assert (high["at_or_above_step"], high["at_or_above_tau_0"]) == (0.5, 1.0)
    assert (study.summary["steps"], study.summary["tokens_per_step_p50"]) == (2, 4)
    rest = [(2.0 - x) / 3 for x in (0.25, 0.75, 0.5, 0.5)]
    rest += [(8.0 - x) / 3 for x in (1.0, 3.0, 2.5, 1.5)]
    expected = np.corrcoef(one.entropy_nats, rest)[0, 1]
    assert study.summary["correlation"] == pytest.approx(expected, abs=1e-6)


def test_groups_and_cells_hold_every_token(tmp_path):
    answers = random_answers(8, [500, 700])
    study = step_entropies(dump_of(tmp_path / "d", answers))
    for table in ("groups", "histogram"):
        assert sum(row["tokens"] for row in study.tables[table]) == 1200, table
    assert len(study.tables["groups"]) == 10
    tops = [row["step_to_nats"] for row in study.tables["groups"]]
    bottoms = [row["step_from_nats"] for row in study.tables["groups"]]
    assert all(top < bottom for top, bottom in zip(tops, bottoms[1:], strict=False))


@pytest.mark.parametrize("entropies", [[0.0], [0.0, 0.0, 0.0], [1.0]])
def test_dumps_without_any_spread(tmp_path, entropies):
    study = step_entropies(dump_of(tmp_path / "d", [answer(entropies)]))
    assert study.summary["correlation"] is None
    assert [row["tokens"] for row in study.tables["groups"]] == [len(entropies)]
    json.loads(study.to_json())
