"""A run that is killed at random moments ends with the scores of one that was left alone."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from reset.evaluate.runner import run
from reset.evaluate.store import SAMPLES, SCORES, read_samples
from tests.reset.evaluate.scripted import ScriptedEngine, WordGrader, plan

KILLS = 20


def start(folder):
    """The run in a process of its own; its number."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            engine = ScriptedEngine(seconds_each=0.004)
            run(plan(40), engine, WordGrader(), folder, resume=True)
            status = 0
        finally:
            os._exit(status)
    return process


@pytest.mark.parametrize("seed", [0, 1])
def test_twenty_random_kills_change_no_byte_of_the_scores(tmp_path, seed):
    """120 samples of 4 ms and a flush each: kills come 0 .. 60 ms after the start."""
    run(plan(40), ScriptedEngine(), WordGrader(), tmp_path / "whole")
    generator = random.Random(seed)
    progress = set()
    for _ in range(KILLS):
        process = start(tmp_path / "run")
        time.sleep(generator.uniform(0, 0.06))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        file = tmp_path / "run" / SAMPLES
        progress.add(file.read_bytes().count(b"\n") if file.exists() else 0)
    assert len(progress) > 3, "the kills fell on too few moments to show anything"
    process = start(tmp_path / "run")
    assert os.waitpid(process, 0)[1] == 0
    assert len(read_samples(tmp_path / "run")) == 120
    whole = (tmp_path / "whole" / SCORES).read_bytes()
    assert (tmp_path / "run" / SCORES).read_bytes() == whole
