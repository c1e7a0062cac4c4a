"""Processes of several ranks: none is left when their test ends, well or not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.ranks import BIND, PATIENCE, rank_environment, run_to_end

# Starts a process that would live for a minute and holds no pipe, tells its id, and goes on.
PARENT = """
import subprocess, sys, time
pipes = {name: subprocess.DEVNULL for name in ("stdin", "stdout", "stderr")}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], **pipes)
print(child.pid, sys.stdin.read(), flush=True)
"""


def is_alive(process: int) -> bool:
    """False for one that has ended and that nobody has asked about yet."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def run(tmp_path: Path, end: str, patience_s: float = 30):
    command = [sys.executable, "-c", PARENT + end]
    return run_to_end(command, "given", tmp_path, dict(os.environ), patience_s)


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc, and vLLM's engines need Linux")
@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(3)", 3)])
def test_what_a_command_started_ends_with_it(tmp_path, end, code):
    done = run(tmp_path, end)
    process, given = done.stdout.split()
    assert (done.returncode, given) == (code, "given")
    assert not is_alive(int(process))


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc, and vLLM's engines need Linux")
def test_a_command_that_hangs_is_ended_and_tells_what_it_wrote(tmp_path):
    with pytest.raises(AssertionError, match=r"did not end in 3 s\n\d+ given") as raised:
        run(tmp_path, "time.sleep(60)", patience_s=3)
    assert not is_alive(int(str(raised.value).splitlines()[1].split()[0]))


@pytest.mark.parametrize("has_gpu", [False, True])
def test_threads_are_left_unbound_on_a_cpu_alone_and_never_against_the_users_word(
    monkeypatch, has_gpu
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    for name in (BIND, PATIENCE):
        monkeypatch.delenv(name, raising=False)
    assert rank_environment().get(BIND) == (None if has_gpu else "nobind")
    monkeypatch.setenv(BIND, "0|1")
    assert set(rank_environment()) == {PATIENCE}
