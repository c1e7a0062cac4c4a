"""Starts `engine_run` in a process of its own, with the plug-in's entry point in reach."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from nvfp4r.vllm.versions import GROUP, PLUGIN
from tests.nvfp4r.vllm.engine_run import MARK
from tests.ranks import run_to_end

ROOT = Path(__file__).parents[3]

Jobs = dict[str, dict[str, Any]]


def run_engines(
    groups: list[tuple[Jobs, dict[str, str]]], entry_point: Path, at_once: int = 2
) -> dict[str, dict[str, Any]]:
    """Answers by job name; each group has a process.

    Args:
        groups: jobs, and the environment of their process.
        entry_point: a folder for package metadata, see `with_entry_point`.
        at_once: processes that run at a time.
    """
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        answers = pool.map(lambda group: _run(*group, entry_point), groups)
        return {name: answer for found in answers for name, answer in found.items()}


def _run(jobs: Jobs, environment: dict[str, str], entry_point: Path) -> dict[str, dict[str, Any]]:
    path = [str(entry_point), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    base = {name: value for name, value in os.environ.items() if not name.startswith("NVFP4R")}
    done = run_to_end(
        [sys.executable, "-m", "tests.nvfp4r.vllm.engine_run"],
        json.dumps(jobs),
        ROOT,
        {
            **base,
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            **environment,
        },
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert answers, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    found: dict[str, dict[str, Any]] = json.loads(answers[0].removeprefix(MARK))
    return found


def with_entry_point(folder: Path) -> Path:
    """A folder for PYTHONPATH that names the plug-in to vLLM, unless the package is installed."""
    if PLUGIN not in {entry.name for entry in metadata.entry_points(group=GROUP)}:
        info = folder / "nvfp4r_plugin-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvfp4r-plugin\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{PLUGIN} = nvfp4r.vllm:register\n")
    return folder
