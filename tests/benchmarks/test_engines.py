"""Processes that start together and answer in turn: benchmarks/engines.py with a fake engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

import engines
from engines import EngineError, Engines, Program, write_entry_point

FAKE = Path(__file__).with_name("fake_engine.py")
BENCHMARKS = Path(engines.__file__).parent


def fake(what: str, *files: Path) -> Program:
    command = [sys.executable, str(FAKE), what, *map(str, files)]
    return Program(command, {"PYTHONPATH": str(BENCHMARKS)})


def is_alive(process: int) -> bool:
    """A zombie that nobody waited for is not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def started(tmp_path, monkeypatch):
    for name in (*engines.CACHES, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(engines, "GRACE_S", 0.5)

    def make(**limits: float) -> Engines:
        return Engines(tmp_path / "caches", tmp_path / "logs", **limits)

    return make


def test_all_start_at_once_and_each_answers_for_itself(started, tmp_path):
    with started() as running:
        reports = running.start({"a": fake("ready"), "b": fake("ready")})
        assert reports["a"]["caches"] == str(tmp_path / "caches" / "a" / "vllm")
        assert reports["b"]["caches"] == str(tmp_path / "caches" / "b" / "vllm")
        share = str(max(1, len(os.sched_getaffinity(0)) // 2))
        for name, question in (("a", 1), ("b", {"batch": 8}), ("a", None)):
            assert running.ask(name, question) == {"asked": question, "threads": share}
    log = (tmp_path / "logs" / "a.log").read_text()
    assert "to the log by print" in log


def test_every_engine_begins_before_one_is_ready(started, tmp_path):
    slow = Program(
        [sys.executable, "-c", f"import time; time.sleep(1); exec(open({str(FAKE)!r}).read())"],
        {"PYTHONPATH": str(BENCHMARKS)},
    )
    slow.command.append("ready")
    before = time.monotonic()
    with started() as running:
        reports = running.start({name: slow for name in "abc"})
        began = [report["began"] - before for report in reports.values()]
        assert max(began) - min(began) < 1.0, "one after the other they would be 1 s apart"


def test_one_that_waits_uses_no_processor_time(started):
    with started() as running:
        running.start({"a": fake("ready"), "b": fake("ready")})
        first = running.ask("a", "times")
        time.sleep(0.5)
        assert running.ask("a", "times") - first <= 0.02


@pytest.mark.parametrize(
    ("what", "limit", "message"),
    [
        ("dies", 60.0, r"(?s)^bad: ended with exit code 1 while starting; .*no such kernel"),
        ("hangs", 1.5, r"(?s)^bad: not done within 1.5 s: bad starting; .*to the log by print"),
    ],
)
def test_one_that_does_not_start_ends_all(started, tmp_path, what, limit, message):
    files = tmp_path / "good", tmp_path / "bad"
    with started(start_timeout=limit) as running, pytest.raises(EngineError, match=message):
        running.start({"good": fake("ready", files[0]), "bad": fake(what, files[1])})
    for file in files:
        for process in json.loads(file.read_text())["processes"]:
            assert not is_alive(process)


@pytest.mark.parametrize(
    ("asked", "question", "message"),
    [
        ("b", "die", r"^b: ended with exit code 7 while answering die; the last lines"),
        ("b", "hang", r"^b: not done within 1 s: b answering hang; the last lines"),
    ],
)
def test_one_that_does_not_answer_ends_all(started, tmp_path, asked, question, message):
    files = tmp_path / "a", tmp_path / "b"
    with started(answer_timeout=1.0) as running:
        running.start({"a": fake("ready", files[0]), "b": fake("ready", files[1])})
        with pytest.raises(EngineError, match=message):
            running.ask(asked, question)
        for file in files:
            for process in json.loads(file.read_text())["processes"]:
                assert not is_alive(process)


def test_one_that_dies_while_another_answers_is_named(started, tmp_path):
    file = tmp_path / "idle"
    with started(answer_timeout=30.0) as running:
        running.start({"busy": fake("ready"), "idle": fake("ready", file)})
        os.kill(json.loads(file.read_text())["processes"][0], signal.SIGKILL)
        with pytest.raises(EngineError, match=r"^idle: ended with exit code -9"):
            running.ask("busy", "hang")


def test_some_stop_and_others_start_beside_those_that_go_on(started, tmp_path):
    file = tmp_path / "a"
    with started() as running:
        running.start({"a": fake("ready", file), "b": fake("ready")})
        running.stop("a")
        assert not any(map(is_alive, json.loads(file.read_text())["processes"]))
        running.start({"c": fake("ready")})
        assert running.ask("b", 1)["asked"] == running.ask("c", 1)["asked"] == 1
        with pytest.raises(KeyError):
            running.ask("a", 1)


def test_sigterm_takes_the_engines_along(tmp_path):
    program = (
        "import sys; from pathlib import Path; from engines import *\n"
        "here, fake, file = map(Path, sys.argv[1:])\n"
        "with Engines(here, here) as running:\n"
        "    running.start({'a': Program([sys.executable, str(fake), 'ready', str(file)])})\n"
        "    print('ready', flush=True)\n"
        "    running.ask('a', 'hang')\n"
    )
    file = tmp_path / "a"
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), str(FAKE), str(file)],
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.communicate(timeout=20)[1] == "ended by SIGTERM\n"
    assert process.returncode == 1
    assert not any(map(is_alive, json.loads(file.read_text())["processes"]))


def test_what_the_user_has_set_stays(started, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/mine")
    with started() as running:
        assert running.start({"a": fake("ready")})["a"]["caches"] == "/mine"


def test_an_entry_point_is_found_in_its_folder(tmp_path):
    write_entry_point(tmp_path, "a.group", "reset", "reset.vllm:ReSETLogitsProcessor")
    (found,) = (
        entry for one in metadata.distributions(path=[str(tmp_path)]) for entry in one.entry_points
    )
    assert (found.group, found.name) == ("a.group", "reset")
    assert found.value == "reset.vllm:ReSETLogitsProcessor"
