"""How fast weights become NVFP4: the function on one matrix, and a whole checkpoint by the command.

    python benchmarks/quantize.py [--model FOLDER]

Goals: 135 M weights <= 20 s on 2 cores; >= 1 GB/s of bf16 on a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from harness import microseconds, record, seconds
from nvfp4r import quantize, reference
from nvfp4r.format import unpack_codes


def check(weight: torch.Tensor) -> None:
    """What is timed has to be right: the codes of a few rows, against the slow reference."""
    sample = weight[:8, :256].contiguous()
    tensor = quantize(sample)
    codes, scale_bytes, _ = reference.quantize(sample, tensor.global_scale)
    if not torch.equal(unpack_codes(tensor.codes).cpu(), codes):
        raise RuntimeError("quantize gives other codes than the reference")
    if not torch.equal(tensor.block_scale.view(torch.uint8).cpu(), scale_bytes):
        raise RuntimeError("quantize gives other block scales than the reference")


def matrix(device: str, rows: int, columns: int) -> None:
    weight = torch.randn(rows, columns, device=device).to(torch.bfloat16)
    check(weight)
    figures = microseconds(lambda: quantize(weight), repeats=20, warmup=2)
    speed = weight.numel() * 2 / figures["median_us"] / 1e3
    record("quantize", f"rtn_{device}", N=rows, K=columns, **figures, bf16_gb_per_s=speed)


def checkpoint(model: str) -> None:
    """The whole command, process start and verification included; the first run is a warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "out")
        command = [sys.executable, "-m", "reset.cli.quantize", "--model", model, "--output", output]
        command += ["--force", "--json"]

        def run() -> str:
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        report = json.loads(run())
        record(
            "quantize",
            "reset-quantize_rtn_w4a16",
            model=Path(model).name,
            source_bytes=report["source_bytes"],
            output_bytes=report["output_bytes"],
            peak_memory_bytes=report["peak_memory_bytes"],
            **seconds(run, repeats=5),
        )


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
