"""The cost of rounding activations to NVFP4, or rotating them: fused, or as a kernel apart.

    python benchmarks/prologue.py [--tokens 1,8,16,64] [--shapes all]

`none` is the layer with activations as they are. Of each other kind, `fused` is what the op does:
on the way into shared memory, in the kernel that arranges x for many tokens, or apart where `plan`
says so; `apart` runs it as a kernel of its own whose result the matrix kernel reads; `alone` is
that kernel by itself. Every call of a CUDA graph reads another copy of the weights; consecutive
kernels overlap by programmatic dependent launch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from harness import record
from linear import ROTATED_BYTES, SHAPES
from nvfp4r.format import NVFP4Tensor
from nvfp4r.launches import Layer, plan_for, required_facts, run_plan, run_prologue
from nvfp4r.methods.rotation import rotate
from nvfp4r.packed import PackedWeight, pack
from nvfp4r.quantize import quantize_activations
from nvfp4r.tuning.matrix import random_weight
from nvfp4r.tuning.timing import Call, copies_of, graph_us, read_bandwidth

KINDS = {  # name: (rotates, rounds)
    "none": (False, False),
    "quantise": (False, True),
    "rotate": (True, False),
    "rotate, quantise": (True, True),
}
INPUT_SCALE = 6 / 2688


def truth(x: Tensor, weight: NVFP4Tensor, rotates: bool, scale: Tensor | None) -> Tensor:
    """The product in float64, [M, N]."""
    values = rotate(x) if rotates else x.float()
    if scale is None:
        values = values.to(x.dtype)
    else:
        values = quantize_activations(values, scale)[0] * scale
    return values.double() @ weight.dequantize(torch.float32).double().T


def check(name: str, y: Tensor, expected: Tensor) -> None:
    error = ((y.double() - expected).norm(dim=1) / expected.norm(dim=1)).max().item()
    if not error < 2**-7:
        raise AssertionError(f"{name}: relative error {error}")


def measure(shape: str, M: int, weight: NVFP4Tensor, packed: list[PackedWeight]) -> None:
    """All kinds and ways of one shape and M."""
    N, K = SHAPES[shape]
    index = torch.cuda.current_device()
    facts = required_facts(index)
    x = torch.randn(M, K, device="cuda").bfloat16()
    for kind, (rotates, rounds) in KINDS.items():
        scale = torch.tensor(INPUT_SCALE, device="cuda") if rounds else None
        rotation = "hadamard16" if rotates else None
        layers = [Layer(p.tiles, p.alpha, None, scale, N, K, "bf16", rotation) for p in packed]
        expected = truth(x, weight, rotates, scale)
        plan = plan_for(M, N, K, "bf16", facts, index, rotates or rounds)
        plain = plan_for(M, N, K, "bf16", facts, index)

        def fused(x: Tensor, layer: Layer, plan=plan) -> Tensor:
            return run_plan(plan, x, layer)

        def alone(x: Tensor, layer: Layer) -> Tensor:
            return run_prologue(x, layer.input_scale, facts, rotation=layer.rotation)

        def apart(x: Tensor, layer: Layer, plan=plain, alone=alone) -> Tensor:
            return run_plan(plan, alone(x, layer), layer, prepared=True)

        ways: dict[str, Callable[[Tensor, Layer], Tensor]] = {"fused": fused}
        if kind != "none":
            ways |= {"apart": apart, "alone": alone}
        for way, function in ways.items():
            if way != "alone":
                check(f"{shape}, M = {M}, {kind}, {way}", function(x, layers[0]), expected)
            calls: list[Call] = [lambda x, f=function, v=layer: f(x, v) for layer in layers]
            record(
                "prologue",
                way if kind != "none" else "none",
                **{"shape": shape, "M": M, "N": N, "K": K, "kind": kind},
                plan=f"{plan.kernel}, apart" if plan.apart else plan.kernel,
                **graph_us(calls, x),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="1,8,16,64")
    parser.add_argument("--shapes", default="all", help="comma-separated names, or all")
    arguments = parser.parse_args()
    names = list(SHAPES) if arguments.shapes == "all" else arguments.shapes.split(",")
    record("prologue", "read", tb_per_s=read_bandwidth())
    for name in names:
        N, K = SHAPES[name]
        weights = [random_weight(N, K) for _ in range(copies_of(N * K * 9 // 16, ROTATED_BYTES))]
        packed = [pack(weight, "bf16") for weight in weights]
        for M in map(int, arguments.tokens.split(",")):
            measure(name, M, weights[0], packed)


if __name__ == "__main__":
    main()
