"""What tests need: one place turns markers into skips with a reason, or into failures.

| marker    | needs                                       | where it is missing      |
|-----------|---------------------------------------------|--------------------------|
| `model`   | SmolLM2-135M in .cache (`make model`)       | skipped; in CI a failure |
| `browser` | Chromium on PATH                            | skipped; in CI a failure |
| `modelopt`| the package nvidia-modelopt                 | skipped; in CI a failure |
| `pocket`  | the trained model in lab/pocket_reasoner    | skipped; in CI a failure |
| `gpu`     | a CUDA GPU that torch finds                 | skipped                  |
| `vllm`    | the package vllm                            | skipped                  |

CI is where the environment variable CI is set. With NVFP4R_REQUIRE_GPU=1 (`make test-gpu`) a run in
which no `gpu` test ran fails, with RESET_REQUIRE_VLLM=1 (`make test-vllm`) one in which no `vllm`
test ran: a green run that tested nothing is worse than a red one.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Read when huggingface_hub is imported: no test may depend on what a hub says today.
os.environ["HF_HUB_OFFLINE"] = "1"
# Read when torch is imported: on a busy machine two threads are many times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tables are as wide as this says; tests read them.
os.environ.pop("COLUMNS", None)

MODEL = Path(__file__).parents[1] / ".cache" / "smollm2-135m"
POCKET = Path(__file__).parents[1] / "lab" / "pocket_reasoner" / "model"
DIALECTS = ("modelopt", "compressed-tensors")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
REQUIRED = {"NVFP4R_REQUIRE_GPU": "gpu", "RESET_REQUIRE_VLLM": "vllm"}

pytest_plugins = ["pytester"]


def find_browser() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def missing(marker: str) -> str | None:
    """Why tests with this marker cannot run here, and what to do; None if they can."""
    if marker == "model" and not (MODEL / "config.json").exists():
        return f"no SmolLM2-135M in {MODEL}; fetch it with: make model"
    if marker == "pocket" and not (POCKET / "config.json").exists():
        return (
            f"no trained model in {POCKET}; python -m lab.pocket_reasoner.train makes one on a GPU"
        )
    if marker == "browser" and find_browser() is None:
        return f"none of {', '.join(BROWSERS)} on PATH; install one (Debian: apt install chromium)"
    if marker == "modelopt" and importlib.util.find_spec("modelopt") is None:
        return "the package modelopt is not installed; pip install 'reset-decoding[awq]'"
    if marker == "vllm" and importlib.util.find_spec("vllm") is None:
        return "the package vllm is not installed; make test-vllm sets up an environment"
    if marker == "gpu":
        import torch

        if not torch.cuda.is_available():
            return "torch finds no CUDA GPU; nvfp4r doctor says why"
    return None


def needed_in_ci(marker: str) -> bool:
    """Whether CI has to have what tests with this marker need."""
    return marker in ("model", "pocket", "browser", "modelopt")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in ("model", "pocket", "browser", "modelopt", "vllm", "gpu"):
        if item.get_closest_marker(marker) is None:
            continue
        reason = missing(marker)
        if reason is not None:
            if os.environ.get("CI") and needed_in_ci(marker):
                pytest.fail(f"{reason} (in CI this is a failure)", pytrace=False)
            pytest.skip(reason)


class RequiredCount:
    """Counts the tests of one marker that ran, and fails a run that had to have some."""

    def __init__(self, variable: str, marker: str) -> None:
        self.variable, self.marker = variable, marker
        self.ran = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call" and not report.skipped and self.marker in report.keywords

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self.ran:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.ran:
            reason = missing(self.marker) or "none was selected"
            terminalreporter.write_line(
                f"{self.variable} is set, but no {self.marker} test ran: {reason}"
            )


def pytest_configure(config: pytest.Config) -> None:
    for variable, marker in REQUIRED.items():
        if os.environ.get(variable):
            config.pluginmanager.register(RequiredCount(variable, marker), f"{marker}-count")


@pytest.fixture(scope="session")
def chromium() -> str:
    """A Chromium or Chrome; for tests marked `browser`."""
    path = find_browser()
    assert path is not None, "mark the test with browser"
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16; for tests marked `model`."""
    return MODEL


@pytest.fixture(scope="session")
def smollm2_nvfp4(smollm2, tmp_path_factory) -> dict[str, Path]:
    """SmolLM2 as W4A16 checkpoints, by dialect; for tests marked `model`."""
    folder = tmp_path_factory.mktemp("smollm2")
    for dialect in DIALECTS:
        flags = ("--model", smollm2, "--output", folder / dialect, "--format", dialect)
        run_command("reset.cli.quantize", *flags, "--json")
    return {dialect: folder / dialect for dialect in DIALECTS}


@pytest.fixture(scope="session")
def pocket() -> Path:
    """The folder of the pocket reasoner in bfloat16; for tests marked `pocket`."""
    return POCKET


@pytest.fixture(scope="session")
def pocket_nvfp4(pocket, tmp_path_factory) -> Path:
    """The pocket reasoner as a W4A16 checkpoint; for tests marked `pocket`."""
    folder = tmp_path_factory.mktemp("pocket") / "nvfp4"
    run_command("reset.cli.quantize", "--model", pocket, "--output", folder, "--json")
    return folder


def run_command(module: str, *arguments: object) -> str:
    """Standard output of one of the commands in a process of its own; it has to succeed."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
