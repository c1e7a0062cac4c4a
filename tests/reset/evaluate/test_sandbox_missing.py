"""No sandbox is an error, never a result; and what holds where no namespace may be opened."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest

from reset.evaluate.graders import sandbox
from reset.evaluate.graders.sandbox import Limits, SandboxError, run
from tests.reset.evaluate.sandbox_processes import alive, own_script, program

# sandbox.py alone: the package would load torch.
LOAD = f"""
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("sandbox", {sandbox.__file__!r})
sandbox = sys.modules["sandbox"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sandbox)
if len(sys.argv) > 1:
    sandbox._SCRIPT = pathlib.Path(sys.argv[1])
"""

UNPRIVILEGED = """
import ctypes, os
libc = ctypes.CDLL(None)
for capability in (21, 24):  # CAP_SYS_ADMIN: namespaces; CAP_SYS_RESOURCE: limits
    libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP: binds every program started from here
if os.geteuid() == 0:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    libc.capget(ctypes.byref(header), ctypes.byref(sets))
    for place in (0, 1, 2):
        sets[place] &= ~(1 << 21 | 1 << 24)
    assert libc.capset(ctypes.byref(header), ctypes.byref(sets)) == 0
elif libc.unshare(0x10000000) == 0:  # its own user namespace, in which no other may be opened
    for path, text in (
        ("self/setgroups", "deny"),
        ("self/uid_map", f"{os.getuid()} {os.getuid()} 1"),
        ("self/gid_map", f"{os.getgid()} {os.getgid()} 1"),
        ("sys/user/max_user_namespaces", "0"),
    ):
        with open(f"/proc/{path}", "w") as file:
            file.write(text)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    return own_script(tmp_path, monkeypatch)


def test_another_system_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="on Linux only, this is darwin"):
        run("print(1)")


def test_a_limit_that_cannot_be_set_is_an_error():
    code = program(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        try:
            print(sandbox.run("print(1)", limits=sandbox.Limits(open_files=4096)))
        except sandbox.SandboxError as error:
            print(error)
        """
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > 64, "needs a process that may open files"
    limited = [sys.executable, "-c", UNPRIVILEGED + LOAD + code]
    said = subprocess.run(limited, capture_output=True, text=True).stdout
    assert "no sandbox for code here, so it cannot be judged: RLIMIT_NOFILE cannot be set" in said


def test_a_sandbox_that_does_not_start_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "_SCRIPT", tmp_path / "missing.py")
    with pytest.raises(SandboxError, match=r"cannot be judged: .*No such file"):
        run("print(1)")


@pytest.mark.parametrize("name", ["cpu_seconds", "wall_seconds", "memory_bytes", "file_bytes"])
def test_limits_are_checked(name):
    with pytest.raises(ValueError, match=f"{name} is -1"):
        Limits(**{name: -1})


def test_nothing_outlives_a_caller_that_is_killed(script):
    code = 'sandbox.run("import time; time.sleep(60)", limits=sandbox.Limits(wall_seconds=60))'
    caller = subprocess.Popen([sys.executable, "-c", LOAD + code, str(script)])
    deadline = time.monotonic() + 30
    while len(alive(script)) < 4 and time.monotonic() < deadline:  # the caller is one of them
        time.sleep(0.05)
    assert len(alive(script)) == 4
    caller.kill()
    assert caller.wait() == -signal.SIGKILL
    assert alive(script, patience_s=10) == []


def test_a_run_that_is_killed_from_outside_is_no_pass(script):
    def kill_the_server():
        while len(alive(script)) < 3:
            time.sleep(0.05)
        os.killpg(int(min(alive(script), key=int)), signal.SIGKILL)

    killer = threading.Thread(target=kill_the_server)
    killer.start()
    ended = run("print('right', flush=True)\nwhile True: pass", limits=Limits(cpu_seconds=60))
    killer.join()
    assert (ended.status, ended.detail) == ("error", "its processes were killed from outside")


def test_without_namespaces_the_limits_and_the_hook_still_hold(script):
    code = program(
        """
        from sandbox import Limits, run
        fork = "import ctypes\\nlibc = ctypes.CDLL(None)\\nmade = 0\\nfor _ in range(100):\\n"
        fork += "  child = libc.fork()\\n  if child == 0: libc.sleep(600)\\n"
        fork += "  if child < 0: break\\n  made += 1\\nprint(made < 50)"
        limits = Limits(cpu_seconds=1, wall_seconds=60.0, processes=8)
        first = run("print(input())", "in", limits=limits)
        print(first.confined, first.stdout)
        for source in (
            "import socket; socket.socket()",
            "import os; os.fork()",
            "while True: pass",
            "x = bytearray(4 << 30)",
            "open('x', 'w')",
        ):
            print(run(source, limits=limits).detail)
        print(run(fork, limits=limits).stdout)
        """
    )
    command = [sys.executable, "-c", UNPRIVILEGED + LOAD + code, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == [
        "{'namespaces': False, 'read_only_files': False} in",
        "",
        "PermissionError: the sandbox has no network",
        "PermissionError: the sandbox does not allow os.fork",
        "used its 1 s of CPU",
        "asked for more than 2147483648 bytes",
        "PermissionError: the sandbox lets a program write to standard output only",
        "True",
        "",
    ], done.stderr
    assert alive(script) == []
