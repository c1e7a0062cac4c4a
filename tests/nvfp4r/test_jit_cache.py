"""Compiled kernels on disk: named by content, safe among processes, never needed, never trusted."""

import hashlib
import logging
import multiprocessing
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nvfp4r.jit import cache, cached_cubin, compile_cubin, kernel_sources, target_named
from nvfp4r.jit import compile as compiler

HOPPER = target_named("90a")
SOURCE = 'extern "C" __global__ void k(float* a) { a[threadIdx.x] *= FACTOR; }\n'
SOURCES = {"k.cu": '#include "factor.cuh"\n' + SOURCE, "factor.cuh": "#define FACTOR 2.f\n"}
PROCESSES = 4

# As a user who owns nothing here: root could write anywhere. NVRTC is loaded before.
STRANGER = """
import logging, os, sys
from pathlib import Path
from nvfp4r.jit import cached_cubin, compile_cubin
from tests.nvfp4r.test_jit_cache import HOPPER, SOURCES
logging.basicConfig()
compile_cubin(HOPPER, SOURCES, "k.cu")
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
print(cached_cubin(HOPPER, SOURCES, "k.cu", folder=Path(sys.argv[1]))[:4])
"""


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.told = []

    def emit(self, record):
        self.told.append(record.getMessage())


def race(folder, barrier, results):
    """What each process does."""
    messages = Messages()
    logging.getLogger("nvfp4r").addHandler(messages)
    barrier.wait(60)
    data = cached(folder)
    results.put((hashlib.sha256(data).hexdigest(), messages.told))


def cached(folder, sources=SOURCES, target=HOPPER, options=(), entry="k.cu"):
    return cached_cubin(target, sources, entry, options, folder=folder)


@pytest.fixture
def compilations(monkeypatch):
    """What was really compiled."""
    calls = []

    def counting(*args, **kwargs):
        calls.append(args)
        return compile_cubin(*args, **kwargs)

    monkeypatch.setattr(cache, "compile_cubin", counting)
    return calls


def test_the_second_time_nothing_is_compiled(tmp_path, compilations, caplog):
    folder = tmp_path / "made" / "when needed"
    first = cached(folder)
    assert first == compile_cubin(HOPPER, SOURCES, "k.cu").data
    assert cached(folder) == first
    assert len(compilations) == 1
    assert caplog.records == []


def test_the_log_and_the_command_lie_beside_it(tmp_path):
    data = cached(tmp_path, options=("-DUNUSED=1",))
    (file,) = tmp_path.glob("*.cubin")
    assert file.name.startswith("sm_90a-")
    assert file.read_bytes() == data + hashlib.sha256(data).digest()
    command, *log = file.with_suffix(".log").read_text().splitlines()
    assert command.startswith("nvrtc-")
    assert command.endswith(" -DUNUSED=1 k.cu")
    assert [line for line in log if "Compiling entry function 'k' for 'sm_90a'" in line]
    assert len(list(tmp_path.iterdir())) == 2  # nothing else is left


CHANGES = {
    "header": {"sources": {**SOURCES, "factor.cuh": "#define FACTOR 3.f\n"}},
    "entry text": {"sources": {**SOURCES, "k.cu": SOURCES["k.cu"] + "\n"}},
    "one more header": {"sources": {**SOURCES, "more.cuh": ""}},
    "entry name": {"sources": {**SOURCES, "l.cu": SOURCES["k.cu"]}, "entry": "l.cu"},
    "option": {"options": ("-DUNUSED=1",)},
    "target": {"target": target_named("80")},
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_the_code_changes_the_file(tmp_path, compilations, change):
    cached(tmp_path)
    cached(tmp_path, **CHANGES[change])
    assert len(compilations) == 2
    assert len(list(tmp_path.glob("*.cubin"))) == 2


def test_another_nvrtc_changes_the_file(tmp_path, compilations, monkeypatch):
    cached(tmp_path)
    monkeypatch.setattr(cache, "nvrtc_version", lambda: (99, 1))
    cached(tmp_path)
    assert len(compilations) == 2
    assert len(list(tmp_path.glob("*.cubin"))) == 2


def test_other_fixed_options_change_the_file(tmp_path, compilations, monkeypatch):
    cached(tmp_path)
    monkeypatch.setattr(compiler, "_OPTIONS", ("-std=c++20", *compiler._OPTIONS[1:]))
    cached(tmp_path)
    assert len(compilations) == 2


def test_text_cannot_move_between_sources_unnoticed(tmp_path, compilations):
    # The same characters in the same order, cut in other places.
    for more in ({"x.cuh": "//1\n", "y.cuh": "//2\n"}, {"x.cuh": "//1\ny.cuh//2\n"}):
        cached(tmp_path, sources={**SOURCES, **more})
    assert len(compilations) == 2


def test_the_order_of_sources_does_not_matter(tmp_path, compilations):
    cached(tmp_path)
    cached(tmp_path, sources=dict(reversed(SOURCES.items())))
    assert len(compilations) == 1


DAMAGES = {
    "empty": lambda blob: b"",
    "cut": lambda blob: blob[: len(blob) // 2],
    "without its seal": lambda blob: blob[:-32],
    "a bit flipped": lambda blob: blob[:500] + bytes([blob[500] ^ 1]) + blob[501:],
    "a byte too long": lambda blob: blob + b"\0",
    "only a seal": lambda blob: hashlib.sha256(b"").digest(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_compiled_again_and_mended(tmp_path, compilations, caplog, damage):
    data = cached(tmp_path)
    (file,) = tmp_path.glob("*.cubin")
    blob = file.read_bytes()
    file.write_bytes(DAMAGES[damage](blob))
    assert cached(tmp_path) == data
    assert file.read_bytes() == blob
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: the file is damaged; compiling its kernels again"
    ]
    assert cached(tmp_path) == data
    assert len(compilations) == 2


@pytest.mark.parametrize("before", ["nothing", "a damaged file"])
def test_processes_that_start_at_once_agree(tmp_path, before):
    if before == "a damaged file":
        cached(tmp_path)
        (file,) = tmp_path.glob("*.cubin")
        file.write_bytes(file.read_bytes()[:100])
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    barrier, results = processes.Barrier(PROCESSES), processes.Queue()
    racers = [
        processes.Process(target=race, args=(tmp_path, barrier, results)) for _ in range(PROCESSES)
    ]
    for racer in racers:
        racer.start()
    told = [results.get(timeout=120) for _ in racers]
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0] * PROCESSES
    (file,) = tmp_path.glob("*.cubin")
    kept = cached(tmp_path)
    assert {digest for digest, _ in told} == {hashlib.sha256(kept).hexdigest()}
    assert sorted(tmp_path.iterdir()) == sorted([file, file.with_suffix(".log")])
    if before == "nothing":
        assert [messages for _, messages in told] == [[]] * PROCESSES  # nobody saw half a file


def test_no_home_folder_costs_one_warning(compilations, caplog):
    assert cached(None).startswith(b"\x7fELF")
    (record,) = caplog.records
    assert "no home folder, and NVFP4R_CACHE_DIR is not set" in record.getMessage()
    assert record.levelno == logging.WARNING


def test_a_file_in_the_place_of_the_folder_costs_one_warning(tmp_path, caplog):
    place = tmp_path / "cache"
    place.write_text("")
    assert cached(place).startswith(b"\x7fELF")
    (record,) = caplog.records
    assert record.getMessage() == (
        f"compiled CUDA kernels cannot be kept ({place}: File exists), so every process compiles "
        "them anew; set NVFP4R_CACHE_DIR to a folder that can be written"
    )


def test_a_full_disk_leaves_nothing_behind(tmp_path, caplog, monkeypatch):
    def full(self, blob):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert cached(tmp_path).startswith(b"\x7fELF")
    assert list(tmp_path.iterdir()) == []
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()


@pytest.mark.parametrize("filled", [False, True])
def test_a_folder_that_may_only_be_read(filled):
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to strangers
        folder = Path(name)
        if filled:
            cached(folder)
            for file in folder.iterdir():
                file.chmod(0o444)
        folder.chmod(0o555)
        try:
            done = subprocess.run(
                [sys.executable, "-c", STRANGER, name], capture_output=True, text=True
            )
        finally:
            folder.chmod(0o755)
        assert done.stdout == "b'\\x7fELF'\n", done.stderr
        warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
        assert len(warnings) == (0 if filled else 1)
        assert filled or "Permission denied" in warnings[0]
        assert len(list(folder.iterdir())) == (2 if filled else 0)


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"NVFP4R_CACHE_DIR": "/chosen", "XDG_CACHE_HOME": "/xdg"}, "/chosen"),
        ({"NVFP4R_CACHE_DIR": "~/chosen"}, "/home/someone/chosen"),
        ({"NVFP4R_CACHE_DIR": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/nvfp4r"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/someone/.cache/nvfp4r"),
        ({}, "/home/someone/.cache/nvfp4r"),
    ],
)
def test_where_the_folder_is(monkeypatch, variables, folder):
    for name in ("NVFP4R_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/someone", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache.cache_folder() == Path(folder)


def test_there_may_be_no_home(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("NVFP4R_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cache.cache_folder() is None


def test_the_package_asks_for_its_own_sources(tmp_path, monkeypatch):
    asked = {}

    def recording(target, sources, entry, options=(), *, folder):
        asked.update(target=target, sources=sources, entry=entry, options=options, folder=folder)
        return b"cubin"

    monkeypatch.setattr(cache, "cached_cubin", recording)
    monkeypatch.setenv("NVFP4R_CACHE_DIR", str(tmp_path))
    assert cache.cubin_for(HOPPER, ("-DSOME=1",)) == b"cubin"
    assert asked == {
        "target": HOPPER,
        "sources": kernel_sources(),
        "entry": "nvfp4r.cu",
        "options": ("-DSOME=1",),
        "folder": tmp_path,
    }
