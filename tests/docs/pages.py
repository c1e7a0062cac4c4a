"""The documents as tests see them: code blocks, links, command lines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@dataclass(frozen=True)
class Block:
    """A fenced block: its language ("" if none), its text, and where it begins."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def links(page: Path) -> list[str]:
    """Targets of links and pictures that are files of the repository."""
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target.split("#")[0] for target in targets if not re.match(r"\w+:|#", target)]


def command_lines(page: Path, commands: tuple[str, ...]) -> list[list[str]]:
    """Words of every line, or piece of code within one, that calls one of `commands`."""
    text = page.read_text(encoding="utf-8")
    quoted = re.findall(r"`([^`\n]+)`", text)
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    words = [piece.split() for piece in (*quoted, *lines)]
    return [found for found in words if found and found[0] in commands]
