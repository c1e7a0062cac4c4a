"""The picture that moves: it says what was measured, and moves at that speed."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

import recording
from tests.benchmarks.e2e_lines import all_lines


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "e2e.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in all_lines()))
    return path


def test_it_says_what_was_measured_where_and_when(results):
    picture = recording.draw(recording.lines_of(results, "qwen3-32b"))
    text = " ".join(ElementTree.fromstring(picture).itertext())
    for said in ("qwen3-32b in vLLM 0.26.0, a GPU, batch 1", "2026-01-02", "at measured speed"):
        assert said in text
    for tpot, rate in (("18.00", "56"), ("9.00", "111"), ("6.00", "167")):
        assert f"{tpot} ms per token, {rate} tokens/s" in text
    for line in filter(None, recording.TEXT.splitlines()):
        assert text.count(line) == 3
    assert "<script" not in picture


def test_every_engine_writes_at_its_own_speed(results):
    picture = recording.draw(recording.lines_of(results, "qwen3-32b"))
    (cycle,) = set(re.findall(r"-bar (\d+\.\d+)s linear infinite", picture))
    total = sum(map(recording.tokens, recording.TEXT.splitlines()))
    for impl, tpot in (("bf16", 18.0), ("stock", 9.0), ("nvfp4r", 6.0)):
        ends = [
            float(share) / 100 * float(cycle)
            for share in re.findall(rf"@keyframes {impl}-\d+ .*?\}} ([\d.]+)%, 100%", picture)
        ]
        assert ends == sorted(ends)
        assert ends[-1] == pytest.approx(total * tpot / 1e3, abs=1e-3)
    assert float(cycle) == pytest.approx(total * 18e-3 + recording.REST_S, abs=1e-3)


def test_words_numbers_and_marks_are_tokens():
    assert recording.tokens("so 1,000 / 3 = 333.3, or 333.") == 10
    assert recording.tokens("") == 0


def test_lines_fit_their_panel():
    assert max(map(len, recording.TEXT.splitlines())) * 6.4 <= recording.COLUMN - 24


def test_an_engine_without_figures_is_named(results):
    with pytest.raises(ValueError, match="no figures of qwen3-8b at batch 1 for bf16, stock, nvf"):
        recording.lines_of(results, "qwen3-8b")


def test_the_command_writes_the_picture(results, tmp_path, monkeypatch):
    out = tmp_path / "demo.svg"
    monkeypatch.setattr("sys.argv", ["recording.py", "--results", str(results), "--out", str(out)])
    recording.main()
    assert out.read_text() == recording.draw(recording.lines_of(results, "qwen3-32b"))
