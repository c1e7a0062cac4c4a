"""docs/quantisation.md against the code: methods, what they need, and numbers."""

from __future__ import annotations

import re

import pytest

from nvfp4r.format import E4M3_MAX
from nvfp4r.hf import awq
from nvfp4r.methods import METHODS
from nvfp4r.methods.four_over_six import TOP_SCALE
from nvfp4r.methods.gptq import DAMPING
from reset.analyze.weights import RULES
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "quantisation.md").read_text(encoding="utf-8")
FLAT = " ".join(PAGE.split())


def rows(header: str) -> dict[str, list[str]]:
    """The cells of a table by what its first column holds in backticks."""
    lines = PAGE[PAGE.index(header) :].splitlines()[2:]
    table = {}
    for line in lines:
        if not line.startswith("|"):
            break
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for name in re.findall(r"`([a-z0-9-]+)`", first):
            table[name] = cells
    return table


def test_every_method_has_a_row_a_paragraph_and_a_cost():
    methods = rows("| method | sees |")
    assert set(methods) == set(METHODS) == set(rows("| method | time |"))
    for name, method in METHODS.items():
        sees, _, checkpoint, _ = methods[name]
        assert ("calibration texts" in sees) == method.calibrated
        assert (checkpoint == "rotated") == (method.rotation is not None)
        assert re.search(rf"^\*\*{name}\*\* \(.*\d", PAGE, flags=re.MULTILINE), name


@pytest.mark.parametrize("header", ["| method | weight error", "| | W4A16 | W4A4 |"])
def test_every_method_has_results(header):
    missing = set(METHODS) - set(rows(header))
    assert missing <= ({"awq"} if "weight" in header else set())  # awq has no weight error


def test_numbers():
    assert (TOP_SCALE, 1.5 * TOP_SCALE) == (256, 384)
    assert 1.5 * TOP_SCALE <= E4M3_MAX
    assert "256 when scaled to 6, and 384 to 4" in FLAT
    assert DAMPING == 0.01
    assert "damped by 1 % of its mean diagonal" in FLAT
    assert f"{1 + awq._SEARCH_PASSES} runs of the texts, 11 of them" in FLAT
    assert f"for every {awq._PACK_TOKENS:,} tokens" in FLAT


def test_the_columns_of_the_weights_study_are_explained():
    page = (ROOT / "docs" / "analysis.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| `(\w+)` \|", page[page.index("## weights") :], flags=re.MULTILINE)
    assert set(explained) <= set(RULES)
    assert len(explained) == 5
