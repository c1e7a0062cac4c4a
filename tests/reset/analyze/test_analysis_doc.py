"""docs/analysis.md against the code: commands, flags, tensors and numbers."""

import re
from pathlib import Path

import pytest
import typer.main

from reset.analyze import distribution, dump, measure, shift, steps
from reset.cli.analyze import app

PAGE = (Path(__file__).parents[3] / "docs" / "analysis.md").read_text(encoding="utf-8")
COMMANDS = typer.main.get_command(app).commands
LINES = re.findall(r"^    reset-analyze (\w+) (.*)$", PAGE, flags=re.MULTILINE)


def flags(command: str) -> set[str]:
    return {name for parameter in COMMANDS[command].params for name in parameter.opts}


@pytest.mark.parametrize(("command", "rest"), LINES, ids=[name for name, _ in LINES])
def test_commands_exist_with_their_flags(command, rest):
    used = set(re.findall(r"--[a-z0-9-]+", rest))
    assert used
    assert used <= flags(command)


def test_every_flag_in_the_text_exists():
    known = set().union(*(flags(name) for name in COMMANDS))
    assert set(re.findall(r"`(--[a-z0-9-]+)", PAGE)) <= known


def test_every_subcommand_has_a_section():
    assert re.findall(r"^## (\w+)$", PAGE, flags=re.MULTILINE) == list(COMMANDS)


def test_the_table_of_tensors_is_what_is_written():
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)?) \| ([^|]*\[[PT]\]) \|", PAGE, flags=re.MULTILINE)
    names = [name for cell, _ in rows for name in re.findall(r"\w+", cell)]
    assert names == [*dump._FIELDS, *dump._SAMPLER_FIELDS]


def test_numbers():
    assert measure.LOGITS_BYTES == 256 << 20
    assert measure.ROWS_BYTES == 64 << 20
    for text in ("256 MiB", "64 MiB", f"({measure._MAX_CHUNK} tokens at most)"):
        assert text in PAGE
    assert (distribution._NGRAM, steps._GROUPS) == (8, 10)
    assert "eight tokens" in PAGE
    assert "ten groups" in PAGE
    defaults = {p.name: p.default for p in COMMANDS["shift"].params}
    assert (defaults["low_percentile"], defaults["high_percentile"]) == (50, 95)
    assert "below the 50th" in PAGE.replace("\n", " ")
    assert shift.shift.__kwdefaults__["high_percentile"] == 95
