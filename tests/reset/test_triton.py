"""The Triton kernels without a GPU: under Triton's interpreter, and compiled for GPUs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from reset import StepDetector
from reset.tracker import RequestTracker

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" and importlib.util.find_spec("triton") is None,
    reason="Triton has no wheel for this platform",
)


def python(*arguments: str, **environment: str) -> str:
    """Output of a Python process of its own, which must succeed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_kernels_agree_with_torch_under_the_interpreter():
    """The cases of kernel_cases.py; the last line of the output says how many ran."""
    output = python(
        *("-m", "pytest", "-p", "no:cacheprovider", "-v"),
        "tests/reset/interpreted_kernels.py",
        TRITON_INTERPRET="1",
    )
    assert "passed" in output.splitlines()[-1]
    assert "skipped" not in output.splitlines()[-1]


def test_they_compile_for_gpus_without_contracting_the_policys_arithmetic(tmp_path):
    targets = ("80", "90", "100", "120")
    output = python("tests/reset/compile_kernels.py", *targets, TRITON_CACHE_DIR=str(tmp_path))
    assert output.splitlines() == [f"sm_{target}: 3 kernels, 2 formats" for target in targets]


def test_triton_without_a_gpu_is_refused():
    detector = StepDetector.from_pieces(["a", "\n"])
    with pytest.raises(ValueError, match="needs a CUDA device, not cpu; use backend='torch'"):
        RequestTracker(detector, slots=1, device="cpu", backend="triton")
