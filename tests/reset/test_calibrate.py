"""Percentiles and provenance files."""

import json
import math

import numpy as np
import pytest

from reset import ReSETConfig
from reset.calibrate import (
    RESAMPLES,
    Calibration,
    folder_sha256,
    percentile_threshold,
    text_sha256,
    threshold_interval,
)


def test_c3_the_percentile_rule_is_numpy_linear_over_pooled_tokens():
    assert percentile_threshold([[0.0] * 80 + [1.0] * 20]) == pytest.approx(0.2)
    assert percentile_threshold([[0.0] * 80, [1.0] * 20]) == pytest.approx(0.2)  # pooled
    assert percentile_threshold([[0.0, 1.0, 2.0]], 50) == 1.0


@pytest.mark.parametrize(
    ("entropies", "percentile", "message"),
    [
        ([], 80, "no tokens"),
        ([[], []], 80, "no tokens"),
        ([[0.1], [math.nan]], 80, "problem 1"),
        ([[-0.1]], 80, "problem 0"),
        ([[0.1]], 101, "percentile is 101"),
        ([[0.1]], math.nan, "percentile is nan"),
    ],
)
def test_bad_entropies(entropies, percentile, message):
    with pytest.raises(ValueError, match=message):
        percentile_threshold(entropies, percentile)


@pytest.mark.parametrize("percentile", [0, 33.3, 80, 100])
def test_the_interval_is_a_bootstrap_over_problems_of_the_same_rule(percentile):
    """Against numpy on the tokens of the resampled problems one behind the other."""
    draw = np.random.default_rng(1)
    problems = [draw.exponential(size=size).tolist() for size in (7, 40, 1, 23)]
    generator = np.random.default_rng(3)
    expected = [
        np.percentile(
            np.concatenate([problems[one] for one in generator.integers(0, 4, 4)]), percentile
        )
        for _ in range(RESAMPLES)
    ]
    found = threshold_interval(problems, percentile, seed=3)
    assert found == pytest.approx(np.quantile(expected, [0.025, 0.975]), rel=1e-12)
    assert threshold_interval(problems, percentile, seed=3) == found


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """Problems that differ from each other, 30 of them: tokens alone would give a far narrower
    interval. tau_0 of all problems there are is that of a mixture, here taken from 20,000."""
    generator = np.random.default_rng(0)

    def problems(count):
        return [generator.exponential(scale, 50) for scale in generator.uniform(0.2, 1.8, count)]

    truth = percentile_threshold(problems(20_000))
    covered = 0
    for seed in range(24):
        low, high = threshold_interval(problems(30), seed=seed)
        covered += low <= truth <= high
    assert covered >= 20  # of 24; 95 % would be 22.8


def test_one_problem_has_no_interval():
    assert threshold_interval([[0.1, 0.2]]) is None
    assert threshold_interval([[0.1, 0.2], []]) is None
    with pytest.raises(ValueError, match="problem 1"):
        threshold_interval([[0.1], [math.nan]])
    with pytest.raises(ValueError, match="level is 1"):
        threshold_interval([[0.1], [0.2]], level=1)


def calibration(**config: float) -> Calibration:
    return Calibration(
        config=config,
        percentile=80.0,
        model="m",
        model_sha256="0" * 64,
        quantisation={"format": "none"},
        data="d.jsonl",
        problems=[text_sha256("p")],
        tokens=[3],
        truncated=0,
        sampling={"temperature": 0.6, "seed": 0},
        versions={"torch": "2"},
    )


def test_c3_a_calibration_file_is_a_preset_with_provenance(tmp_path):
    path = tmp_path / "c.json"
    calibration(tau_0=0.5, t_low=0.2).write(path)
    assert ReSETConfig.from_file(path) == ReSETConfig(t_low=0.2, tau_0=0.5)
    written = json.loads(path.read_text())
    for key in ("percentile", "problems", "tokens", "model_sha256", "quantisation", "rule"):
        assert written[key], key
    assert list(tmp_path.iterdir()) == [path]


def test_a_calibration_comes_back_as_it_went_in(tmp_path):
    path = tmp_path / "c.json"
    one = calibration(tau_0=0.5)
    one.write(path)
    assert Calibration.read(path) == one
    one.write(tmp_path / "several.json", "m")
    assert Calibration.read(tmp_path / "several.json", "m") == one
    path.write_text('{"config": {"tau_0": 0.5}, "remark": ""}')
    with pytest.raises(ValueError, match=r"missing: \['data', .*unknown: \['remark'\]"):
        Calibration.read(path)


def test_a_file_without_t_low_still_asks_for_it(tmp_path):
    calibration(tau_0=0.5).write(tmp_path / "c.json")
    with pytest.raises(ValueError, match="t_low is missing"):
        ReSETConfig.from_file(tmp_path / "c.json")
    assert ReSETConfig.from_file(tmp_path / "c.json", t_low=0.1).tau_0 == 0.5


def test_model_identity_follows_the_content(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"a")
    first = folder_sha256(tmp_path)
    (tmp_path / "notes.txt").write_text("not part of the model")
    assert folder_sha256(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"b")
    assert folder_sha256(tmp_path) != first
    with pytest.raises(ValueError, match=r"neither config\.json nor"):
        folder_sha256(tmp_path / "missing")
