"""Comparisons: what is a difference, what is none, and which runs cannot be compared."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from reset.config import ReSETConfig
from reset.evaluate import figure
from reset.evaluate.compare import HIGHER, LOWER, NOT_SHOWN, compare, read_run, verdict
from reset.evaluate.figure import write_comparison
from reset.evaluate.problems import Answer
from reset.evaluate.stats import Estimate
from reset.evaluate.store import SCORES
from tests.reset.evaluate.scripted import finished_run


def right_in(share, reason="stop"):
    """A script that is right for this share of problems, and for all samples of them."""

    def script(request):
        number = int(request.messages[-1][1].split("problem ")[1].split("?")[0])
        word = "7" if (37 * number) % 40 < 40 * share else "8"
        return Answer(f"so answer {word}", reason, 4)

    return script


def runs(folder, **shares):
    for name, share in shares.items():
        finished_run(folder / name, right_in(share), count=40, n_samples=2)
    return [read_run(folder / name) for name in shares]


def test_a_large_difference_is_shown_both_ways(tmp_path):
    low, high = runs(tmp_path, low=0.25, high=0.75)
    lines = compare([low, high]).lines
    assert [line.verdict for line in lines] == ["baseline", HIGHER]
    assert lines[1].difference.mean == pytest.approx(0.5)
    assert lines[1].ratio == pytest.approx(3.0)
    assert compare([high, low]).lines[1].verdict == LOWER


def test_a_small_difference_is_not_shown(tmp_path):
    line = compare(runs(tmp_path, base=0.5, other=0.525)).lines[1]
    assert line.difference.mean == pytest.approx(0.025)
    assert line.difference.low <= 0 <= line.difference.high
    assert line.verdict == NOT_SHOWN


def test_equal_runs_show_nothing(tmp_path):
    line = compare(runs(tmp_path, base=0.5, other=0.5)).lines[1]
    assert (line.difference.low, line.difference.high) == (0.0, 0.0)
    assert line.verdict == NOT_SHOWN


def test_more_comparisons_need_wider_intervals(tmp_path):
    base, one, two, three, four = runs(tmp_path, a=0.5, b=0.6, c=0.4, d=0.3, e=0.7)
    alone, among = compare([base, one]), compare([base, one, two, three, four])
    assert (alone.level, among.level) == (pytest.approx(0.95), pytest.approx(0.9875))
    first, same = alone.lines[1].difference, among.lines[1].difference
    assert same.mean == first.mean
    assert same.high - same.low > first.high - first.low
    assert alone.lines[1].score == among.lines[1].score


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.01, 0.2, HIGHER),
        (-0.2, -0.01, LOWER),
        (0.0, 0.2, NOT_SHOWN),
        (-0.2, 0.0, NOT_SHOWN),
        (math.nan, math.nan, NOT_SHOWN),
    ],
)
def test_an_interval_that_touches_zero_shows_nothing(low, high, said):
    assert verdict(Estimate(0.1, 0.05, low, high, 0.95), 0.001) == said


def test_chance_being_likely_shows_nothing_either():
    found = Estimate(0.1, 0.05, 0.01, 0.2, 0.99)
    assert verdict(found, 0.02) == NOT_SHOWN
    assert verdict(found, 0.009) == HIGHER


def test_a_handful_of_problems_shows_nothing_however_large_the_difference(tmp_path):
    """Five of five better: without a difference, that happens once in 16 times."""
    for name, word in (("bad", "8"), ("good", "7")):
        finished_run(
            tmp_path / name, lambda _, w=word: Answer(f"so answer {w}", "stop", 3), count=5
        )
    line = compare([read_run(tmp_path / name) for name in ("bad", "good")]).lines[1]
    assert line.difference.low == 1.0
    assert line.p_value == pytest.approx(2 / 32, abs=0.02)
    assert line.verdict == NOT_SHOWN


def test_settings_that_differ_are_told(tmp_path):
    script = right_in(0.5)
    finished_run(tmp_path / "base", script)
    warm = ReSETConfig(policy="fixed", base_temp=1.0)
    finished_run(tmp_path / "warm", script, config=warm)
    finished_run(tmp_path / "both", script, config=warm, max_tokens=10)
    base, *others = (read_run(tmp_path / name) for name in ("base", "warm", "both"))
    comparison = compare([base, *others])
    assert comparison.lines[1].differs_in == ("policy.base_temp 0.6 -> 1.0",)
    assert len(comparison.lines[2].differs_in) == 2
    finished_run(tmp_path / "reset", script, config=ReSETConfig(t_low=0.1, tau_0=0.5))
    (policy,) = compare([base, read_run(tmp_path / "reset")]).lines[1].differs_in
    assert policy.startswith("policy fixed: T 0.6 -> reset: T_low 0.1")
    (remark,) = [text for text in comparison.remarks if "both:" in text]
    assert "no one of them can be named as the cause" in remark


def test_h7_more_truncation_in_one_run_is_remarked(tmp_path):
    finished_run(tmp_path / "base", right_in(0.5))
    finished_run(tmp_path / "cut", right_in(0.5, reason="length"))
    remarks = compare([read_run(tmp_path / name) for name in ("base", "cut")]).remarks
    assert "cut: 100% of its answers are truncated, 0% of the baseline's" in remarks[0]
    assert "6 problems are few" in remarks[1]


def test_runs_of_other_problems_are_refused(tmp_path):
    finished_run(tmp_path / "six", right_in(0.5))
    finished_run(tmp_path / "nine", right_in(0.5), count=9)
    six, nine = (read_run(tmp_path / name) for name in ("six", "nine"))
    with pytest.raises(ValueError, match="0 are only in the first, 3 only in the second"):
        compare([six, nine])
    changed = replace(six, path=tmp_path / "x", settings={**six.settings, "task_sha256": "0"})
    with pytest.raises(ValueError, match="the same problems with other texts or answers"):
        compare([six, changed])
    with pytest.raises(ValueError, match="1 run was given"):
        compare([six])
    with pytest.raises(ValueError, match="given twice"):
        compare([six, six])


def test_a_run_without_a_score_is_refused(tmp_path):
    finished_run(tmp_path / "run", right_in(0.5))
    (tmp_path / "run" / SCORES).unlink()
    with pytest.raises(ValueError, match="not complete, or its output was refused"):
        read_run(tmp_path / "run")
    with pytest.raises(ValueError, match="is no run of reset-run"):
        read_run(tmp_path)


def test_folders_of_one_name_are_told_apart(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        finished_run(tmp_path / name / "run", right_in(0.5))
    both = [read_run(tmp_path / name / "run") for name in ("a", "b")]
    assert [line.name for line in compare(both).lines] == [str(run.path) for run in both]


def test_the_figure_and_the_numbers_beside_it(tmp_path):
    comparison = compare(runs(tmp_path, base=0.5, **{"a$b_c": 0.9}))
    paths = write_comparison(comparison, tmp_path / "out")
    assert [path.name for path in paths] == [f"comparison.{e}" for e in ("json", "png", "svg")]
    numbers = json.loads(paths[0].read_text())
    assert numbers["lines"][1]["verdict"] == HIGHER
    assert numbers["lines"][1]["difference"]["level"] == pytest.approx(0.95)
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in paths[2].read_text()


def test_a_missing_matplotlib_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(figure.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'reset-decoding\[plot\]'"):
        write_comparison(compare(runs(tmp_path, a=0.5, b=0.5)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_problem_gives_numbers_that_are_json(tmp_path):
    for name in ("a", "b"):
        finished_run(tmp_path / name, right_in(0.5), count=1)
    comparison = compare([read_run(tmp_path / name) for name in ("a", "b")])
    write_comparison(comparison, tmp_path / "out")
    numbers = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert numbers["lines"][1]["difference"]["low"] is None
    assert numbers["lines"][1]["verdict"] == NOT_SHOWN
