"""Figures: whole files of both kinds, axes with units, and lines that a grey print tells apart."""

import csv
import json
import re

import pytest

from reset.analyze import figures
from reset.analyze.distribution import distribution
from reset.analyze.estimators import estimators
from reset.analyze.shift import shift
from reset.analyze.steps import step_entropies
from reset.analyze.study import Study
from tests.reset.analyze.records import answer, dump_of, random_answers

AXES = {
    "distribution": ("token entropy (nats)", "share of tokens per 0.1 nats"),
    "steps": ("mean entropy of the step (nats)", "token entropy (nats)"),
    "shift": ("token entropy, mean of both models (nats)", "change of entropy (nats)"),
    "estimators": ("position in the step (tokens)", "mean absolute error (nats)"),
}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dumps")
    lengths = [300, 200, 250]
    return [
        dump_of(folder / "a", random_answers(1, lengths), model="Qwen_3$8B"),
        dump_of(folder / "b", random_answers(2, lengths), quantisation={"format": "NVFP4, x"}),
    ]


@pytest.fixture(scope="module")
def studies(dumps):
    return {
        "distribution": distribution(dumps),
        "steps": step_entropies(dumps[0], tau_0=0.5),
        "shift": shift(*dumps),
        "estimators": estimators(dumps[0]),
    }


@pytest.mark.parametrize("name", AXES)
def test_png_svg_and_the_numbers_beside_them(studies, tmp_path, name):
    study, prefix = studies[name], tmp_path / f"{name}.v1"
    written = [*study.write(prefix), *figures.write_figures(study, prefix)]
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in written}
    assert (tmp_path / f"{name}.v1.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / f"{name}.v1.svg").read_text()
    for label in AXES[name]:
        assert label in drawn
    assert drawn.rstrip().endswith("</svg>")
    content = json.loads((tmp_path / f"{name}.v1.json").read_text())
    assert content["name"] == name
    for table, rows in study.tables.items():
        with (tmp_path / f"{name}.v1.{table}.csv").open() as stream:
            read = list(csv.DictReader(stream))
        assert len(read) == len(rows) == len(content["tables"][table]) > 0
        assert list(read[0]) == list(rows[0])


@pytest.mark.parametrize("name", AXES)
def test_the_same_numbers_give_the_same_files(studies, tmp_path, name):
    first, second = (tmp_path / kind for kind in ("a", "b"))
    for prefix in (first, second):
        figures.write_figures(studies[name], prefix)
    for end in ("png", "svg"):
        files = [tmp_path / f"{prefix.name}.{end}" for prefix in (first, second)]
        assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(("name", "lines"), [("estimators", 4), ("shift", 2), ("steps", 3)])
def test_lines_differ_in_more_than_colour(studies, name, lines):
    figure = figures._figure()
    figures._DRAW[name](studies[name], figure)
    drawn = [one for one in figure.axes[0].lines if one.get_marker() not in ("None", "_", "|", "")]
    looks = {(one.get_linestyle(), one.get_marker()) for one in drawn}
    assert len(looks) == len({look[0] for look in looks}) == len({look[1] for look in looks})
    assert len(looks) == lines
    shades = sorted(_grey(one.get_color()) for one in drawn[:lines])
    assert shades[0] < shades[-1]


def _grey(color: str) -> float:
    red, green, blue = (int(part, 16) for part in re.findall("..", color[1:]))
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_an_answer_of_one_token_can_be_drawn(tmp_path):
    dump = dump_of(tmp_path / "d", [answer([0.0])])
    for study in (distribution([dump]), step_entropies(dump), shift(dump, dump), estimators(dump)):
        figures.write_figures(study, tmp_path / study.name)


def test_bad_targets(studies, tmp_path):
    study = studies["shift"]
    with pytest.raises(ValueError, match=r"folder .* does not exist"):
        study.write(tmp_path / "none" / "shift")
    with pytest.raises(ValueError, match="is a folder"):
        study.files(tmp_path)
    with pytest.raises(ValueError, match="there is no figure of 'x'"):
        figures.write_figures(Study("x", {}, {}, [], {}, {}), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_message_says_what_to_install(studies, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"reset-decoding\[plot\]"):
        figures.write_figures(studies["shift"], tmp_path / "shift")
