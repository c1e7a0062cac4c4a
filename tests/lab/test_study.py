"""The study from end to end on a model trained for seconds, its tables, refusals."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from lab.pocket_reasoner import drawing, measure, study, tables
from lab.pocket_reasoner.arms import ARMS, FIXED, candidates, choose, samples_of, study_arms
from lab.pocket_reasoner.decode import BatchEngine
from lab.pocket_reasoner.problems import FAMILIES, make_problems
from lab.pocket_reasoner.quantised import quantise
from lab.pocket_reasoner.results import compare_all
from lab.pocket_reasoner.tables import fill, markdown, marks

from reset.analyze.dump import Dump
from reset.config import ReSETConfig
from reset.evaluate.engines import Request

ROOT = Path(__file__).parents[2]
BEGIN, END = marks()
FLAGS = (
    *("--problems", "3", "--seeds", "2", "--calibration-problems", "2", "--max-tokens", "24"),
    *("--calibration-seeds", "1", "--dumped", "1", "--texts", "2", "--rows", "48", "--quick"),
    *("--chain-steps", "1", "2", "--search-numbers", "3", "3"),
)


def plan_of(model, output, *more):
    return study.parse(["--model", str(model), "--output", str(output), *FLAGS, *more])


@pytest.fixture(scope="module")
def studied(trained, tmp_path_factory):
    output = tmp_path_factory.mktemp("study") / "toy"
    plan = plan_of(trained[0], output)
    return plan, study.run(plan)


def test_every_model_and_arm_is_there(studied):
    plan, results = studied
    assert results == json.loads((plan.output / "results.json").read_text())
    assert list(results["models"]) == ["bf16", "w4a16", "w4a4"]
    for facts in results["models"].values():
        assert tuple(facts["arms"]) == ARMS
        assert facts["calibration"]["best_fixed"] in FIXED
        for arm, one in facts["arms"].items():
            for family in FAMILIES:
                report = one["families"][family]
                assert report["problems"] == 3
                assert report["samples"] == (3 if arm == "greedy" else 6)
                assert 1 <= report["tokens_per_answer"] <= 24
    assert len({facts["engine"]["model_sha256"] for facts in results["models"].values()}) == 3
    assert set(results["diagnostics"]["shift"]) == {"w4a16", "w4a4"}
    assert set(results["diagnostics"]["steps"]) == {"bf16", "w4a16", "w4a4"}


def test_every_form_scores_the_answers_that_bf16_gave(studied):
    plan, results = studied
    dumps = [Dump.open(plan.output / f"dump-{name}") for name in results["models"]]
    policy = ReSETConfig(policy="fixed", base_temp=0.6)
    asked = [
        Request((("user", problem.question),), number, policy, plan.scale.max_tokens)
        for number, family in enumerate(FAMILIES)
        for problem in make_problems(family, "evaluation", 3, difficulty=plan.difficulty)[:1]
    ]
    engine = BatchEngine.load(plan.model, rows=len(asked))
    for number, decoded in engine.decode(asked):
        records = [dump.read(number) for dump in dumps]
        assert {tuple(one.token_id.tolist()) for one in records} == {decoded.ids}
        assert {one.finish_reason for one in records} == {"given"}
        # One pass over the whole answer sees what the decoder saw token by token.
        seen = np.array(decoded.entropy_nats)
        np.testing.assert_allclose(records[0].entropy_nats, seen, atol=1e-5)
        assert np.abs(records[1].entropy_nats - seen).max() > 1e-3
    assert [dump.total for dump in dumps] == [len(asked)] * 3


def test_what_a_reader_gets(studied):
    plan, results = studied
    tables = (plan.output / "tables.md").read_text()
    assert tables == markdown(results)
    for name in ("accuracy.png", "shift-w4a4.png", "steps-bf16.json", "measured-w4a16.json"):
        assert (plan.output / name).stat().st_size > 0
    assert plan.command in tables
    assert all(f"| {arm} |" in tables for arm in ARMS)
    examples = json.loads((plan.output / "measured-bf16.json").read_text())["examples"]
    assert {one["arm"] for one in examples} == set(ARMS)
    assert all(one["text"] is not None for one in examples)


def test_going_on_takes_what_is_there_and_refuses_other_settings(studied):
    plan, results = studied
    again = study.run(plan_of(plan.model, plan.output, "--resume"))
    for name in ("models", "comparisons", "diagnostics"):
        assert again[name] == results[name]
    with pytest.raises(ValueError, match="measured with other settings"):
        study.run(plan_of(plan.model, plan.output, "--resume", "--top-p", "0.5"))
    with pytest.raises(ValueError, match="is there already"):
        plan_of(plan.model, plan.output)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "/nowhere"), "holds no config.json; make a model with"),
        (("--dumped", "4"), "4 problems a family are to be dumped; need 1 to 3"),
        (("--seeds", "0"), "seeds is 0"),
        (("--search-insight", "2.0"), "insight is 2.0"),
    ],
)
def test_refused(toy_folder, tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        plan_of(toy_folder, tmp_path / "study", *flags)
    assert not (tmp_path / "study").exists()


def test_the_full_size_is_what_was_promised(toy_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan, quick = (study.parse(["--model", str(toy_folder), *more]) for more in ([], ["--quick"]))
    assert (plan.scale.problems, plan.scale.seeds, plan.quick) == (500, 8, False)
    assert (quick.scale, quick.quick) == (measure.QUICK, True)
    assert measure.QUICK.problems < plan.scale.problems
    assert [str(one.output) for one in (plan, quick)] == [
        *(".cache/pocket-study", ".cache/pocket-study-quick")
    ]


def test_choice_on_calibration():
    tried = candidates(0.5)
    scores = {name: 0.1 for name in tried}
    assert choose(scores) == ((0.1, 0.6), "greedy")  # the first of equals
    assert choose({**scores, "0.3/1.0": 0.4, "T=0.6": 0.3}) == ((0.3, 1.0), "T=0.6")
    arms = study_arms(0.5, 0.3, 1.0)
    assert tuple(arms) == ARMS
    assert {arms[name].policy for name in ARMS} == {
        *("fixed", "reset", "threshold", "sliding", "relative", "uniform")
    }
    assert [samples_of(arms[name], 8) for name in ("greedy", "T=0.3", "ReSET")] == [1, 8, 8]


def facts(best, **correct):
    """What `measure_model` returns, as far as comparisons look at it."""
    return {
        "calibration": {"best_fixed": best},
        "arms": {
            arm: {"families": {"chain": {"correct": dict(enumerate(flags))}}}
            for arm, flags in correct.items()
        },
    }


def test_comparisons_by_hand():
    right, half, wrong = [[True, True]] * 40, [[True, False]] * 40, [[False, False]] * 40
    models = {
        "bf16": facts("a", a=half, b=right, c=wrong),
        "w4a4": facts("b", a=wrong, b=half, c=half),
    }
    found = compare_all(models)
    assert found["scores"]["bf16"]["a"]["mean"] == 0.5
    against = found["against_best_fixed"]["bf16"]
    assert {arm: (one["mean"], one["verdict"]) for arm, one in against.items()} == {
        "b": (0.5, "higher"),
        "c": (-0.5, "lower"),
    }
    assert against["b"]["level"] == pytest.approx(0.975)
    cost = found["cost_of_quantisation"]["w4a4"]
    assert [round(one["mean"], 9) for one in cost.values()] == [-0.5, -0.5, 0.5]
    assert found["against_best_fixed"]["w4a4"]["c"]["verdict"] == "no difference shown"
    assert np.isclose(cost["a"]["level"], 1 - 0.05 / 3)


def test_an_arm_without_a_score_is_left_out_and_said_so(studied):
    _, results = studied
    models = json.loads(json.dumps(results["models"]))
    models["w4a4"]["arms"]["T=1.0"]["families"]["chain"] = {"no_score": "degenerate"}
    models["w4a4"]["calibration"]["best_fixed"] = "T=1.0"
    compared = compare_all(models)
    assert "T=1.0" not in compared["scores"]["w4a4"]
    assert compared["against_best_fixed"]["w4a4"] == {}
    assert "no score" in markdown({**results, "models": models, "comparisons": compared})


def test_the_page_is_filled_between_its_marks():
    page = f"before\n\n{BEGIN}\n\nold\n\n{END}\nafter\n"
    filled = fill(page, "| new |\n")
    assert filled == f"before\n\n{BEGIN}\n\n| new |\n\n{END}\nafter\n"
    assert fill(filled, "| new |") == filled
    for broken in ("no marks", f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}", f"{BEGIN}{END}{END}"):
        with pytest.raises(ValueError, match="the page needs"):
            fill(broken, "x")
    first, last = marks("top-p 1")
    two = f"{filled}{first}{last}"
    assert fill(two, "| other |", "top-p 1") == f"{filled}{first}\n\n| other |\n\n{last}"
    assert fill(two, "| new |") == two
    with pytest.raises(ValueError, match="the page needs '<!-- tables of top-p 1: begin"):
        fill(filled, "x", "top-p 1")


def test_the_page_has_tables_of_a_full_study_with_command_and_date():
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    tables = page.partition(BEGIN)[2].partition(END)[0].strip()
    assert re.match(r"\d{4}-\d\d-\d\d, NVIDIA .*: 500 problems a family, 8 seeds", tables)
    assert "\n    python -m lab.pocket_reasoner.study " in tables
    assert "--quick" not in tables
    assert tables.count("### ") == 6


def call(main, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    main()


def test_the_commands_for_page_and_figure(studied, tmp_path, monkeypatch, capsys):
    plan, results = studied
    page, full = tmp_path / "accuracy.md", tmp_path / "results.json"
    page.write_text(f"top\n{BEGIN}\n\nas it was\n\n{END}\n")
    with pytest.raises(SystemExit):
        call(tables.main, monkeypatch, plan.output / "results.json", page)
    assert "is of a quick study" in capsys.readouterr().err
    assert "as it was" in page.read_text()
    full.write_text(json.dumps({**results, "quick": False}))
    call(tables.main, monkeypatch, full, page)
    assert page.read_text() == fill(f"top\n{BEGIN}\n\n{END}\n", markdown(results))
    with pytest.raises(SystemExit):
        call(tables.main, monkeypatch, full, page, "--study", "top-p 1")
    assert "accuracy.md: the page needs '<!-- tables of top-p 1: begin" in capsys.readouterr().err
    call(drawing.main, monkeypatch, full, tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == (plan.output / "accuracy.png").read_bytes()


def test_what_reset_quantize_refuses_is_passed_on(tmp_path):
    with pytest.raises(ValueError, match="form is 'w8a8'"):
        quantise(tmp_path, tmp_path / "x", "w8a8", tmp_path / "t.jsonl", "cpu")
    with pytest.raises(ValueError, match=r"reset-quantize --model .* failed: Error: .*overlaps"):
        quantise(tmp_path, tmp_path / "x", "w4a16", tmp_path / "t.jsonl", "cpu")


def test_a_study_without_figures(trained, tmp_path):
    plan = plan_of(trained[0], tmp_path / "x", "--no-figures", "--no-graphs", "--device", "cpu")
    assert (plan.figures, plan.graphs, plan.dtype, plan.rows) == (False, False, "float32", 48)
