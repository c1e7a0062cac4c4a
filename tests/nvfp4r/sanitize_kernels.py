"""Runs every kernel on small matrices, for NVIDIA's compute-sanitizer to watch.

    compute-sanitizer --tool racecheck python -m tests.nvfp4r.sanitize_kernels OPTIONS

OPTIONS are further ones of the compiler: with EVERY_LANE (kernels/stages.cuh) racecheck can follow
the kernels. The dense product behind an unpacked weight is left out: it is cuBLAS, in whose kernels
racecheck finds what it takes for races.
"""

from __future__ import annotations

import sys

import torch

from nvfp4r import quantize
from nvfp4r.jit import ENTRY, compile_cubin, kernel_sources, target_for
from nvfp4r.jit import module as modules
from nvfp4r.launches import Layer, required_facts, unpacked_rows
from nvfp4r.ops import linear
from nvfp4r.packed import pack

EVERY_LANE = "-DNVFP4R_EVERY_LANE_ARRIVES=1"
# N, K and how many tokens; with 64 of them CTAs share the K of 4299 x 1040.
CASES = (
    (333, 272, (1, 2, 8, 16, 40, 64, 65, 200)),
    (24, 3696, (1, 2, 8, 16, 40, 65)),
    (4299, 1040, (64,)),
)


def load(options: list[str]) -> None:
    """Kernels with other options, in the place of the package's own."""
    target = target_for(torch.cuda.get_device_capability())
    cubin = compile_cubin(target, kernel_sources(), ENTRY, options)
    modules._MODULES._modules[0] = modules.load_cubin(0, cubin.data, target)


def main() -> None:
    load(sys.argv[1:])
    torch.manual_seed(0)
    scale = torch.tensor(6 / 2688, device="cuda")
    for N, K, tokens in CASES:
        weight = quantize(torch.randn(N, K, device="cuda"))
        for dtype, order in ((torch.bfloat16, "bf16"), (torch.float16, "f16")):
            packed = pack(weight, order)
            for M in tokens:
                x = torch.randn(M, K, device="cuda").to(dtype)
                for input_scale, rotation in ((None, None), (scale, None), (scale, "hadamard16")):
                    linear(x, packed.tiles, packed.alpha, None, input_scale, N, K, order, rotation)
            layer = Layer(packed.tiles, packed.alpha, None, None, N, K, order, None)
            for _ in unpacked_rows(layer, 512, required_facts(0)):
                pass
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
