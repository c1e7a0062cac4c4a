"""The sandbox: programs that behave, and programs that do not."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from reset.evaluate.graders.sandbox import Limits, Sandbox, run
from tests.reset.evaluate.sandbox_processes import alive, own_script, program

SMALL = Limits(cpu_seconds=1, wall_seconds=60.0, output_bytes=1 << 20)


@pytest.fixture
def script(tmp_path, monkeypatch):
    return own_script(tmp_path, monkeypatch)


# ---- programs that behave ------------------------------------------------------------------------


def test_reads_and_prints():
    ended = run("print(input()[::-1])", "abc\n")
    assert (ended.status, ended.stdout, ended.detail) == ("done", "cba\n", "ended by itself")


def test_a_function_returns_a_value():
    ended = run("def add(a, b): print('noise'); return (a + b, [])", "1\n2", function="add")
    assert (ended.status, json.loads(ended.value), ended.stdout) == ("done", [3, []], "noise\n")


def test_the_modules_of_contests_are_there():
    ended = run("print(gcd(12, 18), Counter('aa')['a'], math.inf, pow(2, 5, 7), List[int])")
    assert ended.stdout == "6 2 inf 4 typing.List[int]\n"


def test_installed_packages_can_be_imported():
    ended = run("import numpy\nprint(int(numpy.arange(4).sum()))", limits=Limits())
    assert (ended.status, ended.stdout) == ("done", "6\n")


def test_deep_recursion_and_threads_with_large_stacks_work():
    ended = run(
        program(
            """
            import threading
            def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
            def main(): print(depth(20_000))
            print(depth(20_000))
            threading.stack_size(1 << 27)
            threading.Thread(target=main).start()
            """
        )
    )
    assert (ended.status, ended.stdout) == ("done", "20000\n20000\n")


def test_sets_have_one_order_in_every_run():
    source = "print(list({'a', 'b', 'c', 'd', 'e'}), hash('x'))"
    assert run(source).stdout == run(source).stdout


def test_runs_share_nothing():
    source = "import math\nprint(getattr(math, 'seen', 'new'), input())\nmath.seen = 'old'"
    with Sandbox(source) as box:
        assert [box.run(text).stdout for text in ("1", "2")] == ["new 1\n", "new 2\n"]


def test_a_large_input_arrives_whole():
    text = "7" * (5 << 20)
    assert run("print(len(input()))", text).stdout == f"{len(text)}\n"


def test_text_of_any_kind_arrives():
    assert run("print(ascii(input()))", "é漢\x00\ud800\n").stdout.startswith("'\\xe9\\u6f22\\x00")


# ---- programs that do not ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "detail"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("x = (", "SyntaxError: "),
        ("input()", "EOFError: EOF when reading a line"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import os; os._exit(1)", "exit code 1"),
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
        ("import nothing_of_this_name", "ModuleNotFoundError: "),
        ("x = '\ud800'", "UnicodeEncodeError: "),
    ],
)
def test_faults_are_named(source, detail):
    ended = run(source)
    assert ended.status == "error"
    assert ended.detail.startswith(detail)


def test_code_that_forks():
    ended = run("import os\nwhile True: os.fork()", limits=SMALL)
    assert (ended.status, ended.detail) == (
        "error",
        "PermissionError: the sandbox does not allow os.fork",
    )


def test_code_that_forks_behind_python_meets_the_limit_of_processes_and_leaves_none(script):
    source = program(
        """
        import ctypes, time
        libc, made = ctypes.CDLL(None), 0
        for _ in range(1000):
            child = libc.fork()
            if child == 0:
                libc.setsid()
                time.sleep(30)
            if child == -1:
                break
            made += 1
        print(made)
        """
    )
    ended = run(source, limits=Limits(processes=8))
    assert (ended.status, ended.stdout) == ("done", "7\n")
    if ended.confined["namespaces"]:
        assert alive(script, patience_s=10) == []


@pytest.mark.parametrize(
    "source",
    [
        "x = bytearray(4 << 30)",
        "x = []\nwhile True: x.append(bytearray(1 << 24))",
        "x = '9' * (4 << 30)",
    ],
)
def test_code_that_allocates_4_gib(source):
    ended = run(source, limits=Limits(memory_bytes=1 << 30))
    assert (ended.status, ended.detail) == ("memory", f"asked for more than {1 << 30} bytes")


def test_code_that_loops():
    ended = run("while True: pass", limits=SMALL)
    assert (ended.status, ended.detail) == ("cpu", "used its 1 s of CPU")


def test_code_that_sleeps(script):
    limits = Limits(wall_seconds=0.5)
    ended = run("import time; time.sleep(600)", limits=limits)
    assert (ended.status, ended.detail) == ("wall", "stopped after 0.5 s")
    assert 0.5 <= ended.seconds < 30
    assert alive(script, patience_s=10) == []


def test_code_that_prints_1_gb():
    ended = run("for _ in range(1024): print('x' * (1 << 20))", limits=SMALL)
    assert (ended.status, ended.detail) == ("output", f"printed more than {1 << 20} bytes")
    assert len(ended.stdout) < SMALL.output_bytes + (1 << 17)


def test_code_that_prints_without_end_to_standard_error_is_stopped_too():
    limits = Limits(wall_seconds=1.0)
    ended = run("import sys\nwhile True: sys.stderr.write('x' * 65536)", limits=limits)
    assert ended.status == "wall"


def test_code_that_reads_stdin_twice():
    source = "import sys\nprint([sys.stdin.read(), sys.stdin.read()])\ninput()"
    ended = run(source, "1\n2\n", limits=SMALL)
    assert ended.stdout == "['1\\n2\\n', '']\n"
    assert ended.detail == "EOFError: EOF when reading a line"


@pytest.mark.parametrize(
    "source",
    [
        "import socket; socket.create_connection(('127.0.0.1', 80))",
        "import socket; socket.socket()",
        "import socket; socket.getaddrinfo('localhost', 80)",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1/')",
    ],
)
def test_there_is_no_network(source):
    assert "the sandbox has no network" in run(source).detail


def test_where_namespaces_are_there_is_no_network_behind_python_either():
    source = program(
        """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        address = bytes([2, 0, 0, 80, 127, 0, 0, 1]) + bytes(8)
        print(libc.connect(libc.socket(2, 1, 0), address, 16), ctypes.get_errno())
        """
    )
    ended = run(source)
    network_is_unreachable = ended.stdout == "-1 101\n"
    assert network_is_unreachable == ended.confined["namespaces"]


@pytest.mark.parametrize(
    "change",
    [
        "open({path!r}, 'w')",
        "open({path!r}, 'a')",
        "os.open({path!r}, os.O_RDWR)",
        "os.remove({path!r})",
        "os.rename({path!r}, {path!r} + 'x')",
        "os.chmod({path!r}, 0)",
        "os.truncate({path!r}, 0)",
        "pathlib.Path({path!r}).unlink()",
        "shutil.rmtree(os.path.dirname({path!r}))",
        "open('new', 'x')",
    ],
)
def test_files_stay_as_they_are(tmp_path, change):
    path = tmp_path / "kept.txt"
    path.write_text("kept")
    tmp_path.chmod(0o777)
    path.chmod(0o666)
    ended = run("import os, pathlib, shutil\n" + change.format(path=str(path)))
    assert ended.detail.startswith("PermissionError: the sandbox ")
    assert path.read_text() == "kept"


def test_no_file_can_grow_behind_python_either():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        source = program(
            f"""
            import ctypes
            libc = ctypes.CDLL(None)
            file = libc.open({folder.encode() + b"/file"!r}, 0o101, 0o666)
            print(libc.write(file, b"data", 4))
            """
        )
        assert run(source).stdout == "-1\n"
        assert [path.stat().st_size for path in Path(folder).iterdir()] in ([], [0])


def test_programs_cannot_raise_their_own_limits():
    source = program(
        """
        import resource
        for name in ("AS", "CPU", "NPROC", "FSIZE", "NOFILE"):
            number = getattr(resource, "RLIMIT_" + name)
            soft, hard = resource.getrlimit(number)
            try:
                resource.setrlimit(number, (hard + 1, hard + 1))
            except ValueError:
                print(name, soft == hard)
        """
    )
    assert run(source).stdout == "AS True\nCPU True\nNPROC True\nFSIZE True\nNOFILE True\n"


def test_a_signal_to_the_parents_is_refused():
    assert "does not allow os.kill" in run("import os; os.kill(os.getppid(), 0)").detail


def test_a_program_after_one_that_was_stopped():
    source = "import time\ntime.sleep(float(input()))\nprint('awake')"
    with Sandbox(source, limits=Limits(wall_seconds=1.0)) as box:
        assert [box.run(text).status for text in ("0", "600", "0")] == ["done", "wall", "done"]


def test_nothing_is_left_behind(script, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Sandbox("print(1)") as box:
        box.run("")
        assert alive(script), "the process that waits for the next input"
    assert alive(script) == []
    assert list(tmp_path.iterdir()) == [script]


@pytest.mark.parametrize(
    "forged",
    [
        {"refused": "no"},
        {"ended": {"signal": 999}},
        {"ended": {"exit": 0, "signal": None, "cpu_seconds": 0.0}},
        {"confined": {}},
        {"value": 7},
        ["x"],
    ],
)
def test_reports_that_a_program_forges_are_without_effect(forged):
    line = json.dumps(forged).encode() + b"\nnoise\n"
    source = program(
        f"""
        import os, time
        text = input()
        for file in range(3, 64):
            try:
                os.write(file, {line!r})
            except OSError:
                pass
        time.sleep(0.1)
        print(text)
        """
    )
    with Sandbox(source) as box:
        for text in ("1", "2"):
            ended = box.run(text)
            assert (ended.status, ended.stdout) == ("done", f"{text}\n")
            assert ended.confined
