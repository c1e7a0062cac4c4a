"""What the documents say is so: the file tree, commands and flags, links, Python blocks."""

from __future__ import annotations

import json
import re
import struct
from fnmatch import fnmatch

import pytest
import typer

from nvfp4r import cli as nvfp4r_cli
from reset.cli import analyze, calibrate, generate, quantize, run
from tests.docs.pages import PAGES, ROOT, blocks, command_lines, links

README = ROOT / "README.md"
COMMANDS = {
    "reset-quantize": quantize.app,
    "reset-generate": generate.app,
    "reset-calibrate": calibrate.app,
    "reset-run": run.app,
    "reset-analyze": analyze.app,
    "nvfp4r": nvfp4r_cli.app,
}
ids = [str(page.relative_to(ROOT)) for page in PAGES]
every_page = pytest.mark.parametrize("page", PAGES, ids=ids)

# ---- the file tree ------------------------------------------------------------------------------

UNLISTED = ("__pycache__", "__init__.py", "py.typed", "*.egg-info", ".*")


def tree() -> dict[str, list[str]]:
    """Folder ("" is the top) to the entries that the README lists in it, in its order."""
    (block,) = [b for b in blocks(README) if b.text.startswith("README.md")]
    listed: dict[str, list[str]] = {"": []}
    folder = ""
    for line in block.text.splitlines():
        entry = re.fullmatch(r"(  )?(\S+)(?: +(\S.*))?", line)
        assert entry, f"the tree has an odd line: {line!r}"
        indent, name, comment = entry.groups()
        if comment is None:  # the heading of a folder whose content follows
            assert name.endswith("/"), f"{name} has no comment"
            folder = name.rstrip("/")
            listed[folder] = []
        elif indent:
            listed[folder].append(name)
        else:
            listed[""].append(name)
    return listed


def real_entries(folder: str) -> list[str]:
    ignored = (ROOT / ".gitignore").read_text().split()
    patterns = (*UNLISTED, *(line.strip("/") for line in ignored))
    return sorted(
        path.name + "/" * path.is_dir()
        for path in (ROOT / folder).iterdir()
        if not any(fnmatch(path.name, pattern) for pattern in patterns)
    )


@pytest.mark.parametrize("folder", [folder for folder in tree() if folder])
def test_the_tree_lists_what_a_folder_holds(folder):
    assert tree()[folder] == real_entries(folder)


def test_the_tree_lists_the_top():
    listed = tree()
    top = [*listed[""], *{folder.split("/")[0] + "/" for folder in listed if folder}]
    assert sorted(top) == sorted([*real_entries(""), ".ci/"])


# ---- commands, links, the picture ---------------------------------------------------------------


def known_flags(words: list[str]) -> set[str]:
    """Flags of the command, or sub-command, that a command line calls."""
    command = typer.main.get_command(COMMANDS[words[0]])
    if words[0] == "reset-run" and (len(words) < 2 or words[1] not in command.commands):
        words = [words[0], "score", *words[1:]]  # scoring needs no sub-command
    if hasattr(command, "commands"):
        assert len(words) > 1, f"{words[0]} is named without a sub-command"
        assert words[1] in command.commands, f"{words[0]} has no sub-command {words[1]}"
        command = command.commands[words[1]]
    return {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)} | {"--help"}


@every_page
def test_commands_and_flags_exist(page):
    for words in command_lines(page, tuple(COMMANDS)):
        if words in (["nvfp4r"], ["reset-analyze"]):  # the package; the command in general
            continue
        flags = {word.split("=")[0] for word in words if word.startswith("--")}
        unknown = flags - known_flags(words)
        assert not unknown, f"{' '.join(words)}: {unknown}"


def test_the_command_check_sees_something():
    assert len(command_lines(README, tuple(COMMANDS))) > 8
    with pytest.raises(AssertionError, match="no sub-command look"):
        known_flags(["nvfp4r", "look"])
    assert "--tau0" in known_flags(["reset-generate"])


@every_page
def test_flags_named_alone_exist(page):
    known = set()
    for name, app in COMMANDS.items():
        parts = getattr(typer.main.get_command(app), "commands", None)
        for words in [[name, part] for part in parts] if parts else [[name]]:
            known |= known_flags(words)
    alone = re.findall(r"`(--[a-z0-9-]+)[^`]*`", page.read_text(encoding="utf-8"))
    assert set(alone) <= known


@every_page
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|^ +)make ([\w-]+)", text, re.MULTILINE))
    assert named <= targets


@every_page
def test_links_lead_to_files(page):
    for target in links(page):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_picture_is_a_small_png():
    data = (ROOT / "docs" / "images" / "trace.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">I", data[16:20])[0] == 1280
    assert len(data) < 250_000
    assert "docs/images/trace.png" in links(README)


# ---- Python -------------------------------------------------------------------------------------

PYTHON = [block for page in PAGES for block in blocks(page) if block.language == "python"]


def test_the_readme_has_about_ten_lines_of_python():
    (block,) = [block for block in PYTHON if block.page == README]
    assert 8 <= sum(bool(line.strip()) for line in block.text.splitlines()) <= 12


@pytest.mark.model
@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_blocks_run(block, smollm2_nvfp4, tmp_path, monkeypatch, capsys):
    """In a folder that holds what `make demo` leaves behind."""
    demo = tmp_path / ".cache" / "demo"
    demo.mkdir(parents=True)
    (demo / "model-nvfp4").symlink_to(smollm2_nvfp4["modelopt"])
    config = {"tau_0": 2.2, "t_low": 0.1, "t_high": 0.6}
    (demo / "calibration.json").write_text(json.dumps({"config": config}))
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.startswith("17 times 24 is")
