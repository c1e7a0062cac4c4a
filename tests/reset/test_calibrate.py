"""Percentiles, provenance files and problem files."""

import json
import math
import sys

import pytest

from reset import ReSETConfig
from reset.calibrate import Calibration, folder_sha256, percentile_threshold, text_sha256
from reset.problems import read_problems


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


def test_problem_files(tmp_path):
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"question": "q1", "answer": "1"}\n\n{"problem": "q2"}\n{"prompt": "q3"}\n')
    assert read_problems(str(lines), 2) == ["q1", "q2"]
    text = tmp_path / "p.txt"
    text.write_text("first\nline two\n\nsecond\n")
    assert read_problems(str(text), 2) == ["first\nline two", "second"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", '{"question": "q"}\n', "holds 1 problems, but 2 were asked for"),
        ("p.jsonl", '{"question": "q"}\n{oops\n', "line 2 is not JSON"),
        ("p.jsonl", '{"question": "q"}\n{"text": "x"}\n', "line 2: an object with a text field"),
        ("p.csv", "a,b\n", r"a \.jsonl or \.txt file is needed"),
    ],
)
def test_bad_problem_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_problems(str(path), 2)


def test_hub_data_without_the_extra_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"reset-decoding\[eval\]"):
        read_problems("AI-MO/NuminaMath-1.5", 1)
    with pytest.raises(ValueError, match="0 problems asked for"):
        read_problems("AI-MO/NuminaMath-1.5", 0)
