"""Cells by hand, noise that is no shift, intervals, and dumps that do not belong together."""

import json

import numpy as np
import pytest

from reset.analyze.shift import shift
from tests.reset.analyze.records import answer, dump_of, random_answers


def pair(folder, old, new):
    return dump_of(folder / "bf16", old), dump_of(folder / "nvfp4", new)


def cells(study, table="groups"):
    rows = study.tables[table]
    return {(row["grouped_by"], row["group"], row["steps"]): row for row in rows}


def test_equal_dumps_do_not_shift(tmp_path):
    answers = random_answers(1, [300, 200])
    study = shift(*pair(tmp_path, answers, answers))
    assert study.summary["tokens"] == 500
    assert study.summary["shift_mean_abs_nats"] == 0
    assert study.summary["likeliest_lost"] == 0
    for row in study.tables["groups"] + study.tables["curve"]:
        assert row["shift_nats"] == row["inflated"] == row["collapsed"] == 0


def test_inflate_and_collapse_by_hand(tmp_path):
    """A confident step of four tokens, then an uncertain one; the mean of the answer is 1.0."""
    old = answer(
        [0.0, 0.2, 0.4, 0.6, 0.0, 0.8, 2.0, 4.0],
        [3],
        logprob_nats=np.full(8, -1.0, dtype=np.float32),
    )
    new = answer(
        [0.3, 0.25, 0.4, 0.6, 0.5, 0.8, 2.0, 3.0],
        [3],
        logprob_nats=np.array([-1, -2, -1, -1, -1, -1, -1, -1], dtype=np.float32),
        rank=np.array([0, 1, 0, 0, 0, 0, 0, 2], dtype=np.int32),
    )
    dumps = pair(tmp_path, [old], [new])
    study = shift(*dumps, low_percentile=40, high_percentile=90, margin_nats=0.1)
    # Percentiles of the sorted 0 0 .2 .4 .6 .8 2 4: index 2.8 -> 0.36, index 6.3 -> 2.6
    rows = cells(study)
    low = rows["reference", "low", "all"]
    assert (low["from_nats"], low["to_nats"], low["tokens"]) == (0.0, 0.36, 3)
    confident = rows["reference", "low", "confident"]
    assert confident["tokens"] == 2
    assert confident["shift_nats"] == pytest.approx(0.175)
    assert (confident["inflated"], confident["collapsed"]) == (0.5, 0.0)
    assert confident["likeliest_lost"] == 0.5
    assert confident["logprob_change_nats"] == -0.5
    uncertain = rows["reference", "low", "uncertain"]
    assert (uncertain["tokens"], uncertain["shift_nats"]) == (1, 0.5)
    high = rows["reference", "very high", "uncertain"]
    assert (high["tokens"], high["shift_nats"], high["collapsed"]) == (1, -1.0, 1.0)
    assert high["to_nats"] is None
    assert ("reference", "very high", "confident") not in rows
    assert high["shift_low_nats"] is None  # one answer says nothing of the next
    for grouped_by in ("reference", "mean"):
        for table in ("groups", "curve"):
            rows_of = [r for r in study.tables[table] if r["grouped_by"] == grouped_by]
            assert sum(r["tokens"] for r in rows_of if r["steps"] == "all") == 8
            assert sum(r["tokens"] for r in rows_of if r["steps"] != "all") == 8


def noisy(truth, seed):
    noise = np.random.default_rng(seed).normal(0, 0.3, len(truth))
    return answer(truth + noise)


def test_noise_alone_is_no_shift_where_tokens_are_grouped_by_the_mean(tmp_path):
    """Regression to the mean: grouped by one of two noisy values, noise looks like a law."""
    truths = [np.random.default_rng(s).uniform(2, 4, 2000) for s in range(20)]
    old = [noisy(truth, 100 + s) for s, truth in enumerate(truths)]
    new = [noisy(truth, 200 + s) for s, truth in enumerate(truths)]
    study = shift(*pair(tmp_path, old, new), low_percentile=5, high_percentile=95)
    rows = cells(study)
    assert rows["reference", "low", "all"]["shift_nats"] > 0.1
    assert rows["reference", "very high", "all"]["shift_nats"] < -0.1
    # 2,000 tokens a group, each with noise of 0.3 x sqrt(2): standard error 0.0095.
    for group in ("low", "middle", "very high"):
        assert abs(rows["mean", group, "all"]["shift_nats"]) < 4 * 0.0095


def test_the_interval_covers_the_truth_about_as_often_as_it_says(tmp_path):
    """Shifts of 0.2 nats +- 0.1 by answer, 40 answers: 95 % of intervals should hold 0.2."""
    generator = np.random.default_rng(0)
    held = 0
    for trial in range(25):
        folder = tmp_path / str(trial)
        folder.mkdir()
        shifts = generator.normal(0.2, 0.1, 40)
        old = [answer([1.0] * 5)] * 40
        new = [answer([1.0 + by] * 5) for by in shifts]
        row = cells(shift(*pair(folder, old, new)))["reference", "very high", "all"]
        held += row["shift_low_nats"] <= 0.2 <= row["shift_high_nats"]
    # Binomial(25, 0.95): fewer than 20 has probability 0.1 %; the seed is fixed.
    assert 20 <= held <= 25


def test_the_same_seed_gives_the_same_file(tmp_path):
    dumps = pair(tmp_path, random_answers(1, [99, 80]), random_answers(2, [99, 80]))
    assert shift(*dumps, seed=3).to_json() == shift(*dumps, seed=3).to_json()
    assert shift(*dumps, seed=3).to_json() != shift(*dumps, seed=4).to_json()
    json.loads(shift(*dumps).to_json())


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ([answer([1.0, 2.0], tokens=[0, 9])], r"answer 0: .* different tokens from position 1 on"),
        ([answer([1.0])], r"answer 0: .* different tokens \(2 and 1\)"),
        ([answer([1.0, 2.0], prompt_ids=np.array([8], dtype=np.int32))], "in the prompt"),
        ([answer([1.0, 2.0])] * 2, "holds 1 answers, .* 2; make the second with --forced"),
    ],
)
def test_dumps_that_do_not_belong_together(tmp_path, new, message):
    with pytest.raises(ValueError, match=message):
        shift(*pair(tmp_path, [answer([1.0, 2.0])], new))


def test_an_unfinished_dump_is_refused(tmp_path):
    old, new = pair(tmp_path, random_answers(1, [9, 9]), random_answers(1, [9, 9]))
    (tmp_path / "nvfp4" / "00001.safetensors").unlink()
    with pytest.raises(ValueError, match="nvfp4: holds 1 of 2 answers"):
        shift(old, new)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low_percentile": 95.0, "high_percentile": 50.0}, "need 0 < low < high < 100"),
        ({"low_percentile": 0.0}, "need 0 < low"),
        ({"margin_nats": -0.1}, "margin is -0.1"),
    ],
)
def test_bad_settings(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        shift(*pair(tmp_path, [answer([1.0])], [answer([1.0])]), **settings)
