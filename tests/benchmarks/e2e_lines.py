"""Lines as benchmarks/e2e.py records them, with invented figures that are easy to divide."""

from __future__ import annotations

from typing import Any

MACHINE = {
    "bench": "e2e",
    "gpu": "a GPU",
    "cpu": "a CPU",
    "driver": "1",
    "torch": "2.11",
    "vllm": "0.26.0",
    "git": "abc",
    "date": "2026-01-02",
    "command": "python benchmarks/e2e.py",
}
TPOT = {"bf16": 18.0, "stock": 9.0, "nvfp4r": 6.0}


def e2e_line(impl: str, model: str = "qwen3-32b", batch: int = 1, **figures: Any) -> dict[str, Any]:
    tpot = TPOT[impl.partition("+")[0]] * batch
    line = {
        **MACHINE,
        "impl": impl,
        "model": model,
        "batch": batch,
        "prompt": 512,
        "load_s": 3.0,
        "start_s": 60.0,
        "weights_gb": 20.0,
        "peak_gb": 22.0,
    }
    for name, value in (("tpot_ms", tpot), ("ttft_ms", 50.0)):
        line |= {name: value, f"lowest_{name}": value, f"highest_{name}": value}
    return line | figures


def all_lines(**same: Any) -> list[dict[str, Any]]:
    return [
        e2e_line("bf16", **same),
        e2e_line("stock", **same, over_bf16=0.5),
        e2e_line("nvfp4r", **same, over_bf16=1 / 3, over_stock=2 / 3, ttft_over_stock=1.2),
    ]
