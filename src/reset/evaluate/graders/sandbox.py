"""Runs a program, written by a model, under limits, and says how it ended.

Always: an own process group, killed as a whole at the end; limits of the kernel on CPU seconds,
address space, threads and processes, open files and the size of files (none may be written by
default); limits of this process on wall-clock time and output; an audit hook in the program's
interpreter that refuses sockets, new processes, signals, and changes to files. If one of the
kernel's limits cannot be set, nothing is run.

Where the kernel lets this user open namespaces (`Run.confined["namespaces"]`): no network but a
loopback that is down, no other process that could be signalled, none that outlives the run, and
from Linux 5.12 on (`["read_only_files"]`) no file system that can be written.

Without them the hook is the only guard of the network and of existing files, and a program that
goes round it on purpose (ctypes) can open sockets, delete files of this user, or leave a process
behind. In no mode are files hidden: what this user can read, the program can, and started by root
it may even read everything if Python itself lies in root's folders. This keeps a benchmark safe
from accidents; it is no boundary against an attacker. Give untrusted models a machine of their own.

Knows neither tests nor right answers: those never enter the program's process.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

Status = Literal["done", "error", "memory", "cpu", "wall", "output"]

_SCRIPT = Path(__file__).with_name("confined.py")
_STARTING_SECONDS = 30.0  # interpreter and limits, on a busy machine
_STDERR_BYTES = 1 << 16
_CHUNK = 1 << 16


class SandboxError(OSError):
    """There is no sandbox here, so no program was run and nothing can be said about one."""


@dataclass(frozen=True)
class Limits:
    """What one run may use.

    `cpu_seconds` are the seconds that LiveCodeBench's own judge allows; `wall_seconds` is generous,
    since a grade must not depend on what else the machine does.
    """

    cpu_seconds: int = 6
    wall_seconds: float = 60.0
    memory_bytes: int = 2 << 30
    processes: int = 32
    open_files: int = 64
    file_bytes: int = 0
    output_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 0 or (value == 0 and name != "file_bytes"):
                raise ValueError(f"{name} is {value}; it must be above zero")


@dataclass(frozen=True)
class Run:
    """How a program ended. `value` is the JSON text of what the function returned, if it did."""

    status: Status
    stdout: str
    detail: str
    seconds: float
    value: str | None = None
    confined: dict[str, bool] = field(default_factory=dict)


_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # the order of sets: the same answer is judged the same twice
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONNOUSERSITE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Sandbox:
    """Runs one program on one input after another. Use it as a context: it holds a process.

    Every input gets a new process, so nothing a program does reaches the next run. An object serves
    one thread; several may be at work at once.

    Args:
        source: the program, in Python.
        function: None, and the program reads standard input; or a name, and the method of that name
            of the class Solution is called, or the function of that name if there is no such class.
        limits: of each run.

    Raises:
        SandboxError: this is not Linux.
    """

    def __init__(
        self, source: str, *, function: str | None = None, limits: Limits | None = None
    ) -> None:
        if sys.platform != "linux":
            raise SandboxError(
                f"code is judged on Linux only, this is {sys.platform}; use a Linux container"
            )
        self._limits = limits or Limits()
        self._job = {
            "source": source,
            "function": function,
            "packages": _packages(),
            "limits": asdict(self._limits),
        }
        self._open = ExitStack()
        self._server: _Server | None = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(self, text: str) -> Run:
        """Runs the program to its end or to the first limit it meets.

        Args:
            text: its standard input, or the arguments of the function, in JSON, one a line.

        Raises:
            SandboxError: there is no sandbox here; the program was not run.
        """
        server = self._server or self._start()
        watch = _Watch(server, self._limits)
        server.send(text)
        watch.until_it_ends()
        if not watch.ended_by_itself:
            self.close()
        return watch.verdict()

    def close(self) -> None:
        """Kills every process there still is."""
        self._server = None
        self._open.close()

    def _start(self) -> _Server:
        folder = self._open.enter_context(tempfile.TemporaryDirectory(prefix="reset-sandbox-"))
        self._server = self._open.enter_context(_Server.started(folder))
        self._server.send(self._job)
        return self._server


def run(
    source: str, text: str = "", *, function: str | None = None, limits: Limits | None = None
) -> Run:
    """One run of one program; see `Sandbox`."""
    with Sandbox(source, function=function, limits=limits) as sandbox:
        return sandbox.run(text)


class _Server:
    """The process that starts one process a run, and the pipes to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], commands: int, reports: int, results: int
    ) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._commands = commands
        self.reports, self.results = reports, results
        self.stdout, self.stderr = process.stdout.fileno(), process.stderr.fileno()
        for descriptor in (reports, results, self.stdout, self.stderr):
            os.set_blocking(descriptor, False)

    @classmethod
    def started(cls, folder: str) -> _Server:
        pipes = [os.pipe() for _ in range(3)]
        commands, reports, results = pipes
        theirs, ours = (commands[0], reports[1], results[1]), (commands[1], reports[0], results[0])
        try:
            process = subprocess.Popen(
                # -S: no .pth file is run; the packages are added by name
                [sys.executable, "-S", str(_SCRIPT), *map(str, theirs)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env=_ENVIRONMENT,
                pass_fds=theirs,
                start_new_session=True,
            )
        except OSError:
            for descriptor in ours:
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        return cls(process, *ours)

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            # Before it is waited for: until then nobody else can have its number.
            os.killpg(self._process.pid, signal.SIGKILL)
        for descriptor in (self._commands, self.reports, self.results):
            os.close(descriptor)

    def send(self, command: Any) -> None:
        """A line of JSON; a server that has died shows in its reports, not here."""
        data = memoryview(json.dumps(command).encode() + b"\n")
        try:
            while data:
                data = data[os.write(self._commands, data) :]
        except BrokenPipeError:
            return


class _Watch:
    """Reads what a run says until it has ended or met one of this process's limits."""

    def __init__(self, server: _Server, limits: Limits) -> None:
        self._limits = limits
        self._stdout, self._stderr = bytearray(), bytearray()
        self._reports, self._results = bytearray(), bytearray()
        self._kept = {
            server.stdout: self._stdout,
            server.stderr: self._stderr,
            server.reports: self._reports,
            server.results: self._results,
        }
        self._records: dict[str, Any] = {}  # by confined.py
        self._outcome: dict[str, Any] = {}  # by the program's own process
        self._met: Status | None = None
        self._started = self._ended = time.monotonic()

    def until_it_ends(self) -> None:
        deadline = self._started + _STARTING_SECONDS
        with selectors.DefaultSelector() as selector:
            for descriptor in self._kept:
                selector.register(descriptor, selectors.EVENT_READ)
            while self._met is None and "ended" not in self._records and selector.get_map():
                left = deadline - time.monotonic()
                if left <= 0:
                    self._met = "wall"
                    break
                was_confined = "confined" in self._records
                for key, _ in selector.select(left):
                    if self._read(key.fd) == b"":
                        selector.unregister(key.fd)
                if "confined" in self._records and not was_confined:
                    self._started = time.monotonic()
                    deadline = self._started + self._limits.wall_seconds
        self._ended = time.monotonic()
        for descriptor in self._kept:  # what was written before the end and is still in the pipes
            for _ in range(self._limits.output_bytes // _CHUNK + 1):
                if self._met is not None or not self._read(descriptor):
                    break

    @property
    def ended_by_itself(self) -> bool:
        """Whether the process of the run is gone, so that the next one may start."""
        return self._met is None and "ended" in self._records

    def _read(self, descriptor: int) -> bytes | None:
        """Keeps and returns what is there; b"" at the end, None if nothing is there now."""
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return None
        kept = self._kept[descriptor]
        if kept is self._stderr:
            kept += data[: _STDERR_BYTES - len(kept)]
            return data
        kept += data
        if len(kept) > self._limits.output_bytes:
            self._met = "output"
        if kept is self._reports or kept is self._results:
            self._take_lines(kept)
        return data

    def _take_lines(self, kept: bytearray) -> None:
        *lines, rest = kept.split(b"\n")
        for line in map(bytes, lines):
            if kept is self._reports:
                self._records.update(json.loads(line))
            else:
                self._outcome.update(_result(line))
        kept[:] = rest

    def verdict(self) -> Run:
        records, outcome = self._records, self._outcome
        if "confined" not in records:
            said = self._stderr.decode(errors="replace").strip().splitlines()[-1:]
            reason = records.get("refused") or "".join(said) or "it did not start"
            raise SandboxError(f"no sandbox for code here, so it cannot be judged: {reason}")
        status, detail = self._status()
        return Run(
            status=status,
            stdout=self._stdout.decode(errors="replace"),
            detail=detail,
            seconds=self._ended - self._started,
            value=json.dumps(outcome["value"]) if status == "done" and "value" in outcome else None,
            confined=records["confined"],
        )

    def _status(self) -> tuple[Status, str]:
        limits, outcome = self._limits, self._outcome
        if self._met == "wall":
            return "wall", f"stopped after {limits.wall_seconds:g} s"
        if self._met == "output":
            return "output", f"printed more than {limits.output_bytes} bytes"
        ended = self._records.get("ended")
        if ended is None:
            return "error", "its processes were killed from outside"
        # The limit counts clock ticks, the account at the end counts time: on a busy machine the
        # two differ. What else kills (memory of the machine) does so long before.
        spent = ended["cpu_seconds"] > 0.5 * limits.cpu_seconds
        if spent and ended["signal"] == signal.SIGKILL:
            return "cpu", f"used its {limits.cpu_seconds} s of CPU"
        if "failed" in outcome:
            name, message = outcome["failed"], outcome.get("message", "")
            if name == "MemoryError":
                return "memory", f"asked for more than {limits.memory_bytes} bytes"
            return "error", f"{name}: {message}" if message else str(name)
        if ended["signal"] is not None:
            return "error", f"killed by {signal.Signals(ended['signal']).name}"
        if ended["exit"] != 0:
            return "error", f"exit code {ended['exit']}"
        return "done", "ended by itself"


def _result(line: bytes) -> dict[str, Any]:
    """A line of results; the program could have written anything there."""
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}


def _packages() -> list[str]:
    paths = sysconfig.get_paths()
    return [paths["purelib"], *({paths["platlib"]} - {paths["purelib"]})]
