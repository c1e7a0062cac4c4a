"""What every benchmark shares: timing, the facts of the machine, one JSON line a measurement."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def microseconds(call: Callable[[], Any], *, repeats: int, warmup: int = 5) -> dict[str, float]:
    """Median, 10th and 90th percentile of `call` on the host clock; CUDA work is waited for."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(warmup):
        call()
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append((time.perf_counter() - start) * 1e6)
    deciles = statistics.quantiles(times, n=10)
    return {"median_us": statistics.median(times), "p10_us": deciles[0], "p90_us": deciles[8]}


def seconds(call: Callable[[], Any], *, repeats: int) -> dict[str, float]:
    """Median and slowest of a few long calls, on the host clock."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return {"median_s": statistics.median(times), "slowest_s": max(times)}


def record(bench: str, impl: str, facts: dict[str, Any] | None = None, /, **figures: Any) -> None:
    """Print one measurement and append it to results/<bench>.jsonl.

    Names carry their unit (`median_us`, `gb_per_s`). Floats are kept to four significant digits.
    `facts` stand for those of this machine where the figures were taken on another.
    """
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in figures.items()}
    line = {"bench": bench, "impl": impl, **rounded, **(facts or machine())}
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{bench}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{bench:10} {impl:24} " + "  ".join(f"{k}={v}" for k, v in rounded.items()), flush=True)


@cache  # it asks nvidia-smi and git, for every line
def machine() -> dict[str, Any]:
    """Where and with what a measurement was taken."""
    has_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "driver": _driver() if has_gpu else None,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": _version("vllm"),
        "git": _output("git", "describe", "--always", "--dirty"),
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
    }


def _driver() -> str | None:
    told = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return told.splitlines()[0] if told else None  # one line for each GPU, all the same


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
