"""Tells the processes of one test's sandboxes from all others."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

from reset.evaluate.graders import sandbox


def program(text):
    return textwrap.dedent(text)


def own_script(tmp_path, monkeypatch):
    """From here on the sandbox starts a copy of its script: its processes are known by the name."""
    script = tmp_path / "confined.py"
    script.write_text(sandbox._SCRIPT.read_text())
    monkeypatch.setattr(sandbox, "_SCRIPT", script)
    return script


def alive(script, *, patience_s=0.0):
    """Processes of `script`; waits up to `patience_s` for them to end."""
    deadline = time.monotonic() + patience_s
    while True:
        found = [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline")]
        found = [number for number in found if str(script) in command_line(number)]
        if not found or time.monotonic() >= deadline:
            return found
        time.sleep(0.05)


def command_line(number):
    try:
        return Path(f"/proc/{number}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return ""
