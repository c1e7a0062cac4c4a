"""Two ranks that share a model: what they need on a CPU, and that no process outlives its test.

Knows nothing of what the engines are asked.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

PATIENCE_S = 900  # an engine of two ranks needs half a minute where two cores are busy
GRACE_S = 10  # in which processes that were asked to end may clean up
BIND = "VLLM_CPU_OMP_THREADS_BIND"
# Ranks notice within 5 s that they are to end; by default vLLM then ends them by force, and their
# shared memory stays behind.
PATIENCE = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"


def rank_environment() -> dict[str, str]:
    """What the environment of two ranks lacks; whoever starts the tests may have said otherwise.

    On a CPU vLLM gives each rank a memory node of its own, and refuses to start where there are too
    few: "nobind" leaves threads where they are.
    """
    wanted = {PATIENCE: "60"}
    if not torch.cuda.is_available():
        wanted[BIND] = "nobind"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def need_two_cpus() -> None:
    """Skips on one CPU: a rank that waits for the other polls, and holds up both."""
    allowed = len(os.sched_getaffinity(0))
    if allowed < 2:
        pytest.skip(
            f"this process may use {allowed} CPU; two ranks need two, as waiting ranks poll"
        )


def run_to_end(
    command: Sequence[str],
    given: str,
    folder: Path,
    environment: Mapping[str, str],
    patience_s: float = PATIENCE_S,
) -> subprocess.CompletedProcess[str]:
    """Runs a command; when this returns or raises, it and all that it started are gone.

    Args:
        given: its standard input.

    Raises:
        AssertionError: it did not end in time; has the end of what it wrote.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
        start_new_session=True,  # a process group that can be ended as one
    ) as process:
        try:
            output, errors = process.communicate(given, timeout=patience_s)
        except subprocess.TimeoutExpired:
            end_group(process)
            output, errors = process.communicate()
            raise AssertionError(
                f"{command} did not end in {patience_s} s\n{output[-3000:]}\n{errors[-6000:]}"
            ) from None
        finally:
            end_group(process)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def end_group(leader: subprocess.Popen[str]) -> None:
    """Asks the processes of a group to end, and soon makes them."""
    deadline = time.monotonic() + GRACE_S
    try:
        os.killpg(leader.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            time.sleep(0.05)
            leader.poll()  # one that has ended counts as long as nobody has asked
            os.killpg(leader.pid, 0)
        os.killpg(leader.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # none is left
