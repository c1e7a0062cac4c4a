"""Percentiles and provenance files."""

import json
import math

import pytest

from reset import ReSETConfig
from reset.calibrate import Calibration, folder_sha256, percentile_threshold, text_sha256


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
