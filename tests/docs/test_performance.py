"""The tables of docs/performance.md are those that the measurements give."""

from __future__ import annotations

import json

import pytest

import tables

FIELDS = {"bench", "impl", "gpu", "driver", "torch", "vllm", "git", "date", "command"}


def test_the_committed_tables_are_those_of_the_results():
    document = tables.DOCUMENT.read_text(encoding="utf-8")
    assert tables.render(document) == document, "run: python benchmarks/tables.py"
    assert document.count("| measured | result | goal |") == len(tables.TABLES)


@pytest.mark.parametrize("path", sorted(tables.RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_every_measurement_says_where_it_comes_from(path):
    for line in path.read_text(encoding="utf-8").splitlines():
        assert set(json.loads(line)) >= FIELDS


def test_a_figure_that_is_missing_is_an_error():
    with pytest.raises(ValueError, match=r"no measurement with .*make bench"):
        tables.last(tables.read_lines("policy"), {"impl": "nothing"})
    with pytest.raises(ValueError, match="no place for policy"):
        tables.render("# no markers")
