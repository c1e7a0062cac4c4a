"""compute-sanitizer finds nothing: no access out of bounds, no race in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nvfp4r.sanitize_kernels import EVERY_LANE

ROOT = Path(__file__).parents[2]
FOLDERS = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
SANITIZER = shutil.which("compute-sanitizer", path=FOLDERS)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer of the CUDA toolkit"),
]


@pytest.mark.parametrize(
    ("tool", "options", "verdict"),
    [
        ("memcheck", (), "ERROR SUMMARY: 0 errors"),
        (
            "racecheck",
            (EVERY_LANE,),
            "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
        ),
    ],
)
def test_nothing_is_found(tool, options, verdict):
    command = [SANITIZER, "--tool", tool, "--report-api-errors", "no", sys.executable]
    done = subprocess.run(
        [*command, "-m", "tests.nvfp4r.sanitize_kernels", *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert "every kernel ran" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert verdict in done.stdout, done.stdout[-6000:]
