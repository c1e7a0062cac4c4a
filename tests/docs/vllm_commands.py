"""The command lines of docs/vllm.md, for the tests that run them."""

from __future__ import annotations

import json
import shlex
from typing import Any

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "vllm.md"


def _lines(start: str) -> list[str]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.startswith("    ") and start in line]


def server_command() -> list[str]:
    """Words of the command that serves on a CPU."""
    (line,) = _lines("api_server")
    return shlex.split(line)


def curl_body() -> dict[str, Any]:
    """The request of the page."""
    (line,) = _lines("chat/completions")
    words = shlex.split(line)
    body: dict[str, Any] = json.loads(words[words.index("-d") + 1])
    return body


def defaults_in_commands() -> list[tuple[dict[str, str], dict[str, Any]]]:
    """(environment, additional config) of every command that sets defaults."""
    found: list[tuple[dict[str, str], dict[str, Any]]] = []
    for line in _lines("vllm serve"):
        words = shlex.split(line)
        if words[0].startswith("RESET_DEFAULTS="):
            found.append(({"RESET_DEFAULTS": words[0].partition("=")[2]}, {}))
        elif "--additional-config" in words:
            found.append(({}, json.loads(words[words.index("--additional-config") + 1])))
    assert len(found) == 2
    return found
