"""Several engines at once, each in a process of its own, asked one at a time.

Starting an engine is nearly all host time and measuring one is nearly all GPU time: so all start
together, and then one measures while the others wait for a line, which costs neither. What an
engine is, is the program's matter; here are only processes, lines of JSON and time limits.

A program gives each engine's process to `Engines.start`, which runs that command and waits until
every one has reported that it is ready; `Engines.ask` puts a question to one of them. The process
calls `serve`. Everything else that it prints goes to a file, LOGS/NAME.log.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Answer = Callable[[Any], Any]
CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}
LINES = 40  # of a log, shown when its engine fails
LOOK_S = 0.25  # between two looks at whether all engines live
GRACE_S = 5.0  # to end by itself after its questions have ended


class EngineError(RuntimeError):
    """An engine ended or took too long; the message names it and ends with its log's last lines."""


@dataclass(frozen=True)
class Program:
    """A command, and what its environment has beyond this process's."""

    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Engine:
    process: subprocess.Popen[bytes]
    log: Path
    unread: bytes = b""


class Engines:
    """Processes that answer questions; leaving the `with` block ends all of them.

    Args:
        folder: for the engines' caches.
        logs: for LOGS/NAME.log; made if missing.
        start_timeout, answer_timeout: seconds.
    """

    def __init__(
        self, folder: Path, logs: Path, start_timeout: float = 300.0, answer_timeout: float = 300.0
    ) -> None:
        self._folder, self._logs = folder, logs
        self._start_timeout, self._answer_timeout = start_timeout, answer_timeout
        self._running: dict[str, _Engine] = {}

    def __enter__(self) -> Engines:
        # `timeout` ends a program by SIGTERM, which would otherwise leave the engines behind.
        self._before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.stop(*self._running)
        self._kill(list(self._running))
        signal.signal(signal.SIGTERM, self._before)

    def start(self, programs: Mapping[str, Program]) -> dict[str, Any]:
        """Run all of them at once; what each reported when it was ready, by name.

        Raises:
            EngineError: one ended before it was ready, or the time was up. All are ended by then.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        for name, program in programs.items():
            log = self._logs / f"{name}.log"
            with log.open("wb") as file:
                process = subprocess.Popen(
                    program.command,
                    env={**os.environ, **self._shares(name, len(programs)), **program.environment},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    start_new_session=True,  # its own processes end with it
                )
            self._running[name] = _Engine(process, log)
        return self._wait(programs, self._start_timeout, "starting")

    def ask(self, name: str, question: Any) -> Any:
        """Put `question` to one engine and wait for its answer; both are JSON.

        Raises:
            EngineError: this engine or another one ended, or the time was up.
        """
        pipe = self._running[name].process.stdin
        assert pipe is not None
        with suppress(BrokenPipeError):  # it has ended; _wait says so
            pipe.write(json.dumps(question).encode() + b"\n")
            pipe.flush()
        return self._wait([name], self._answer_timeout, f"answering {question}")[name]

    def stop(self, *names: str) -> None:
        """End these engines: their questions end, and so should they; then they are killed."""
        for name in names:
            pipe = self._running[name].process.stdin
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        until = time.monotonic() + GRACE_S
        for name in names:
            with suppress(subprocess.TimeoutExpired):
                self._running[name].process.wait(max(0.0, until - time.monotonic()))
        self._kill(names)

    def _wait(self, names: Iterable[str], timeout: float, doing: str) -> dict[str, Any]:
        """A line of each of `names`, while all engines live."""
        lines: dict[str, Any] = {}
        waiting, until = list(names), time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for name in waiting:
                stdout = self._running[name].process.stdout
                assert stdout is not None
                selector.register(stdout, selectors.EVENT_READ, name)
            while len(lines) < len(waiting):
                for key, _ in selector.select(LOOK_S):
                    engine = self._running[key.data]
                    some = os.read(key.fd, 1 << 16)
                    if not some:  # ended, or about to
                        selector.unregister(key.fileobj)
                        continue
                    engine.unread += some
                    line, newline, rest = engine.unread.partition(b"\n")
                    if newline:
                        lines[key.data], engine.unread = json.loads(line), rest
                        selector.unregister(key.fileobj)
                for name, engine in self._running.items():
                    if name not in lines and engine.process.poll() is not None:
                        code = engine.process.returncode
                        self._fail(name, f"ended with exit code {code} while {doing}")
                if len(lines) < len(waiting) and time.monotonic() > until:
                    late = [name for name in waiting if name not in lines]
                    self._fail(late[0], f"not done within {timeout:g} s: {', '.join(late)} {doing}")
        return lines

    def _fail(self, name: str, what: str) -> None:
        log = self._running[name].log
        self._kill(list(self._running))
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES:]
        raise EngineError("\n".join([f"{name}: {what}; the last lines of {log}:", *last]))

    def _kill(self, names: Iterable[str]) -> None:
        for name in names:
            engine = self._running.pop(name)
            with suppress(ProcessLookupError):  # it and all its processes have ended
                os.killpg(engine.process.pid, signal.SIGKILL)
            engine.process.wait()
            until = time.monotonic() + GRACE_S  # its processes hold GPU memory until they end
            while _has_members(engine.process.pid) and time.monotonic() < until:
                time.sleep(0.01)
            for pipe in (engine.process.stdin, engine.process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()

    def _shares(self, name: str, count: int) -> dict[str, str]:
        """An engine's caches and its share of the cores, where the user has not set them.

        torch.compile of several processes in one folder may clash; vLLM itself keeps inductor to
        one thread. MAX_JOBS is for extensions that ninja builds.
        """
        cores = str(max(1, len(os.sched_getaffinity(0)) // count))
        shares = {key: str(self._folder / name / sub) for key, sub in CACHES.items()}
        shares |= {"OMP_NUM_THREADS": cores, "MAX_JOBS": cores}
        return {key: value for key, value in shares.items() if key not in os.environ}


def _has_members(group: int) -> bool:
    """Whether a process of this group is left; one that has ended and waits for its parent is not.

    The kernel counts those too, and in a container nobody may ever wait for them.
    """
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def serve(start: Callable[[], tuple[Any, Answer]]) -> None:
    """In an engine's process: start it, report that it is ready, answer questions until they end.

    `start` gives the report and the function that answers; both results are JSON. From here on
    standard output is the log and standard input is empty, for this process and those it starts.
    """
    with os.fdopen(os.dup(0)) as questions, os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        report, answer = start()
        print(json.dumps(report), file=answers, flush=True)
        for line in questions:
            print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def write_entry_point(folder: Path, group: str, name: str, value: str) -> None:
    """What installing a package with this entry point does, for a PYTHONPATH with `folder`."""
    info = folder / f"{name}_entry_point-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Name: {name}-entry-point\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
