"""NVFP4 linear layers of Qwen3 at small batch, beside vLLM's Marlin kernel and cuBLAS in bf16.

    python benchmarks/linear.py [--tokens 1,2,4,8,16] [--shapes all]

Every call of a CUDA graph reads another copy of the weights, more than 300 MB in all, so that none
comes from L2. Times are of one call. `nvfp4r` is `torch.ops.nvfp4r.linear`, which launches with
programmatic dependent launch (its prologue overlaps the call before); `nvfp4r_no_pdl` is the same
kernel without. Marlin needs vLLM; it is left out, and said so, where vLLM cannot be imported.
Share of read bandwidth: NVFP4 bytes / time / what summing 2 GiB reaches in the same run.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from harness import record
from nvfp4r.format import NVFP4Tensor
from nvfp4r.launches import Layer, plan_for, required_facts, run_plan
from nvfp4r.ops import linear
from nvfp4r.packed import PackedWeight, pack
from nvfp4r.plan import Plan
from nvfp4r.tuning.matrix import random_weight
from nvfp4r.tuning.timing import Call, copies_of, graph_us, read_bandwidth

SHAPES = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (24576, 4096),
    "8B down": (4096, 12288),
    "14B qkv": (7168, 5120),
    "14B o": (5120, 5120),
    "14B gate_up": (34816, 5120),
    "14B down": (5120, 17408),
    "32B qkv": (10240, 5120),
    "32B o": (5120, 8192),
    "32B gate_up": (51200, 5120),
    "32B down": (5120, 25600),
}
ROTATED_BYTES = 320_000_000


def plan_of(M: int, N: int, K: int) -> Plan:
    """What the op uses on the current GPU."""
    index = torch.cuda.current_device()
    return plan_for(M, N, K, "bf16", required_facts(index), index)


def ours(packed: list[PackedWeight], plan: Plan | None = None) -> list[Call]:
    """The op, or the kernel of a plan."""
    calls: list[Call] = []
    for weight in packed:
        stored = (weight.tiles, weight.alpha, None, None, weight.N, weight.K, "bf16")
        if plan is None:
            calls.append(lambda x, a=stored: linear(x, *a))
        else:
            calls.append(lambda x, v=Layer(*stored), p=plan: run_plan(p, x, v))
    return calls


def marlin(weights: list[NVFP4Tensor]) -> list[Call]:
    """vLLM's stock path for NVFP4 on GPUs without FP4 units; [] without vLLM."""
    try:
        from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as fp4
    except ImportError:
        return []
    calls: list[Call] = []
    for weight in weights:
        N, K = weight.shape
        layer = torch.nn.Module()
        layer.params_dtype = torch.bfloat16
        layer.output_size_per_partition, layer.input_size_per_partition = N, K
        for name, value in (
            ("weight", weight.codes),
            ("weight_scale", weight.block_scale),
            ("weight_global_scale", weight.global_scale),
        ):
            setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))
        fp4.prepare_fp4_layer_for_marlin(layer)
        calls.append(lambda x, v=layer, n=N, k=K: _apply_marlin(fp4, v, x, n, k))
    return calls


def _apply_marlin(fp4: Any, layer: Any, x: torch.Tensor, N: int, K: int) -> torch.Tensor:
    return fp4.apply_fp4_marlin_linear(
        input=x,
        weight=layer.weight,
        weight_scale=layer.weight_scale,
        weight_global_scale=layer.weight_global_scale,
        workspace=layer.workspace,
        size_n=N,
        size_k=K,
    )


def check(name: str, y: torch.Tensor, truth: torch.Tensor) -> None:
    """Relative error per row against float64, before anything is timed."""
    error = ((y.double() - truth).norm(dim=1) / truth.norm(dim=1)).max().item()
    if not error < 2**-7:
        raise AssertionError(f"{name}: relative error {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64")
    parser.add_argument("--shapes", default="all", help="comma-separated names, or all")
    arguments = parser.parse_args()
    names = list(SHAPES) if arguments.shapes == "all" else arguments.shapes.split(",")
    tokens = [int(value) for value in arguments.tokens.split(",")]
    read = read_bandwidth()
    record("linear", "read", tb_per_s=read)
    ratios: dict[int, list[float]] = {M: [] for M in tokens}
    for name in names:
        for M, ratio in measure(name, tokens, read).items():
            ratios[M].append(ratio)
    for M, values in ratios.items():
        if values:
            mean = math.exp(sum(map(math.log, values)) / len(values))
            record("linear", "over_marlin", M=M, geometric_mean=mean, worst=min(values))


def measure(name: str, tokens: list[int], read: float) -> dict[int, float]:
    """Every implementation at every M; times as fast as Marlin, by M, where there is Marlin."""
    N, K = SHAPES[name]
    stored_bytes = N * K * 9 // 16
    weights = [random_weight(N, K) for _ in range(copies_of(stored_bytes, ROTATED_BYTES))]
    packed = [pack(weight, "bf16") for weight in weights]
    dense_copies = max(2, math.ceil(ROTATED_BYTES / (N * K * 2)))
    dense = [w.dequantize(torch.bfloat16) for w in weights[:dense_copies]]
    bf16: list[Call] = [lambda x, w=w: F.linear(x, w) for w in dense]
    stock = marlin(weights)
    exact = weights[0].dequantize(torch.float32).double().T
    ratios = {}
    for M in tokens:
        x = torch.randn(M, K, device="cuda").bfloat16()
        plan = plan_of(M, N, K)
        no_pdl = ours(packed, replace(plan, pdl=False)) if M <= 64 and plan.kernel else []
        truth = x.double() @ exact
        times = {}
        for impl, calls in (
            ("nvfp4r", ours(packed)),
            ("nvfp4r_no_pdl", no_pdl),
            ("marlin", stock),
            ("bf16", bf16),
        ):
            if not calls:
                continue
            check(f"{name} {impl}", calls[0](x), truth)
            figures = graph_us(calls, x)
            times[impl] = figures["median_us"]
            size = N * K * 2 if impl == "bf16" else stored_bytes
            speed = size / times[impl] / 1e6
            if speed > 1.05 * read:
                raise AssertionError(f"{name} {impl}: {speed:.2f} TB/s exceeds the memory")
            figures |= {"tb_per_s": speed, "of_read": speed / read}
            if impl.startswith("nvfp4r"):
                figures["path"] = plan.path
            record("linear", impl, shape=name, M=M, N=N, K=K, **figures)
        if "marlin" in times:
            ratios[M] = times["marlin"] / times["nvfp4r"]
    return ratios


if __name__ == "__main__":
    main()
