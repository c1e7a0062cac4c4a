"""Tables, verdicts and the plot of whole models in vLLM, from invented lines."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

import table_e2e
import tables
from tests.benchmarks.e2e_lines import MACHINE, all_lines, e2e_line


def test_speed_and_goals_stand_side_by_side():
    lines = [*all_lines(), *all_lines(batch=8), *all_lines(model="qwen3-8b")]
    rows = table_e2e.e2e_table(lines).splitlines()
    ours = "6.00 (6.00 to 6.00) | 3.00x | >= 2.7x | 1.50x | >= 1.5x |"
    assert any(row.startswith("| qwen3-32b, 1 |") and row.endswith(ours) for row in rows)
    assert any("| qwen3-32b, 8 |" in row and ">= 2.43x | 1.50x | >= 1.35x" in row for row in rows)
    assert any("| qwen3-8b, 1 |" in row and ">= 2.2x | 1.50x | - |" in row for row in rows)
    assert sum(MACHINE["command"] in row for row in rows) == 1
    small, large = (rows.index(next(r for r in rows if x in r)) for x in ("-8b, 1", "-32b, 1"))
    assert small < large


def test_other_prompts_have_a_first_token_alone():
    lines = all_lines()
    for line in all_lines(prompt=8192):
        for name in ("tpot_ms", "over_bf16", "over_stock"):
            line.pop(name, None)
        lines.append(line)
    text = table_e2e.e2e_table(lines)
    assert "| 50.00 (50.00 to 50.00) | 1.20 | <= 1.25 |" in text
    assert "| qwen3-32b | 8192, 1 |" in text
    assert text.count("| qwen3-32b, 1 |") == 1


def test_an_engine_that_was_not_measured_is_a_dash():
    text = table_e2e.e2e_table([e2e_line("nvfp4r")])
    assert "| qwen3-32b, 1 | - | - | 6.00 (6.00 to 6.00) | - | >= 2.7x | - | >= 1.5x |" in text


def test_the_newest_line_counts():
    text = table_e2e.e2e_table([*all_lines(), e2e_line("stock", tpot_ms=8.25, over_bf16=0.4)])
    assert "8.25 (9.00 to 9.00)" in text


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"impl": "nvfp4r", "over_bf16": 1 / 2.75}, "2.75x BF16 (goal >= 2.7, met)"),
        ({"impl": "nvfp4r", "over_stock": 1 / 1.4}, "1.40x stock (goal >= 1.5, missed)"),
        ({"impl": "nvfp4r", "over_stock": 1 / 1.4, "batch": 8}, "1.40x stock (goal >= 1.35, met)"),
        ({"impl": "nvfp4r", "over_stock": 1 / 1.4, "batch": 2}, "1.40x stock"),
        ({"impl": "nvfp4r+reset", "over_plain": 1.02}, "1.020 of plain's time (goal <= 1.02, met)"),
        (
            {"impl": "stock+reset", "over_plain": 1.021},
            "1.021 of plain's time (goal <= 1.02, missed)",
        ),
        ({"impl": "nvfp4r+reset", "over_off": 1.005}, "1.005 of its own time with ReSET off"),
        ({"impl": "nvfp4r+head", "over_plain": 0.93}, "0.930 of plain's time"),
        (
            {"impl": "nvfp4r", "ttft_over_stock": 1.3},
            "first token 1.30 of stock's time (goal <= 1.25, missed)",
        ),
        (
            {"impl": "nvfp4r", "ttft_over_stock": 0.9, "prompt": 2048},
            "first token 0.90 of stock's time (goal <= 1, met)",
        ),
    ],
)
def test_a_ratio_meets_its_goal_or_not(figures, said):
    line = {"model": "qwen3-32b", "batch": 1, "prompt": 512, **figures}
    (verdict,) = table_e2e.verdicts(line)
    where = f"qwen3-32b {line['impl']}, batch {line['batch']}, prompt {line['prompt']}: "
    assert verdict == where + said


def test_what_reset_adds_to_the_plain_engine_and_to_itself():
    with_it = e2e_line("stock+reset", over_plain=1.02, over_off=1.005)
    text = table_e2e.e2e_table([*all_lines(), with_it, e2e_line("nvfp4r+head", over_plain=0.9)])
    assert "| stock+reset | 9.00 (9.00 to 9.00) | 1.020 | <= 1.02 | 1.005 |" in text
    assert "| nvfp4r+head | 6.00 (6.00 to 6.00) | 0.900 | - | - |" in text


def test_the_reset_table():
    def line(impl, **ratios):
        return {
            **MACHINE,
            "impl": impl,
            "model": "qwen3-8b",
            "weights": "nvfp4",
            "batch": 1,
            "tpot_ms": 3.8,
            **ratios,
        }

    ratios = {"on_over_off": 1.01, "lowest_ratio": 1.0, "highest_ratio": 1.03}
    text = table_e2e.reset_table([line("stock"), line("name_off"), line("name_on", **ratios)])
    assert "| qwen3-8b nvfp4, 1 | stock | 3.80 | - | - |" in text
    assert "| name_on | 3.80 | 1.010 (1.000 to 1.030) | <= 1.02 |" in text


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """The real results, and newer ones of a whole model."""
    for path in tables.RESULTS.glob("*.jsonl"):
        (tmp_path / path.name).write_text(path.read_text())
    lines = [*all_lines(), *all_lines(batch=8)]
    with (tmp_path / "e2e.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)


def test_a_section_comes_with_its_results(measured):
    document = "# A\n\n## Goals not measured yet\n\n- all\n"
    with_it = tables.with_section(document, "e2e")
    assert with_it.index("begin: e2e") < with_it.index("## Goals not measured yet")
    assert tables.with_section(with_it, "e2e") == with_it
    assert tables.with_section("# A\n", "e2e").endswith("<!-- end: e2e -->\n")
    once = tables.render(tables.DOCUMENT.read_text(encoding="utf-8"))
    assert "6.00 (6.00 to 6.00) | 3.00x | >= 2.7x" in once
    assert tables.render(once) == once


def test_the_plot_has_a_bar_for_each_and_is_the_same_twice(tmp_path):
    lines = [*all_lines(), *all_lines(batch=8), *all_lines(model="qwen3-8b")]
    pictures = []
    for name in ("a.svg", "b.svg"):
        table_e2e.plot_e2e(lines, tmp_path / name)
        pictures.append((tmp_path / name).read_bytes())
    assert pictures[0] == pictures[1]
    assert pictures[0].count(b"3.00x") == 3
    assert ElementTree.fromstring(pictures[0]).tag.endswith("svg")
