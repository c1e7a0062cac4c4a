"""How fast weights become NVFP4: the function on one matrix, and a whole checkpoint by the command.

    python benchmarks/quantize.py [--model FOLDER]

Goals: 135 M weights <= 20 s on 2 cores; >= 1 GB/s of bf16 on a GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from harness import microseconds, record
from nvfp4r import quantize
from nvfp4r.reference import quantize_reference


def matrix(device: str, rows: int, columns: int) -> None:
    weight = torch.randn(rows, columns, device=device).to(torch.bfloat16)
    sample, quantised = weight[:8, :256].contiguous(), quantize(weight[:8, :256].contiguous())
    truth = quantize_reference(sample.cpu())
    assert torch.equal(quantised.codes.cpu(), truth.codes), "the fast path is wrong"
    figures = microseconds(lambda: quantize(weight), repeats=20, warmup=2)
    speed = weight.numel() * 2 / figures["median_us"] / 1e3
    record("quantize", f"rtn_{device}", N=rows, K=columns, **figures, bf16_gb_per_s=speed)


def checkpoint(model: str) -> None:
    """The whole command, process start and verification included."""
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "out")
        command = [sys.executable, "-m", "reset.cli.quantize", "--model", model, "--output", output]
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        record("quantize", "reset-quantize_rtn_w4a16", seconds=time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a bf16 model folder, for the whole command")
    arguments = parser.parse_args()
    matrix("cpu", 1536, 4096)
    if torch.cuda.is_available():
        matrix("cuda", 24576, 4096)
    if arguments.model:
        checkpoint(arguments.model)


if __name__ == "__main__":
    main()
