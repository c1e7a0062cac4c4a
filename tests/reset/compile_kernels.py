"""Compile the sampler's kernels for architectures, without a GPU, and check what the PTX says:

python tests/reset/compile_kernels.py 80 90
"""

from __future__ import annotations

import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from reset._triton import policy_kernel, scale_kernel, track_kernel
from reset._triton_launch import REGISTERS, TILE, WARPS

V = 151_936
TILES = -(-V // TILE)
SHAPE = {"V": V, "TILE": TILE, "TILES": TILES, "TILES_PAD": triton.next_power_of_2(TILES)}
POINTERS = {
    **dict.fromkeys(("records", "parameters", "history", "fields"), "*fp64"),
    **dict.fromkeys(("partials", "facts", "temperatures", "ring"), "*fp32"),
    **dict.fromkeys(("slots", "token", "position", "tickets"), "*i32"),
    **{"stride": "i32", "table": "*u8", "new_step": "*i1"},
}
TRACKER = {"SLOTS": 64, "MAX_ROWS": 3, "ROWS_PAD": 4, "RECORD": 99, "RING_START": 61, "RING": 35}
POLICY = {"SLOTS": 64, "RING": 32, "slots": None}
# libdevice's exp and log, written with explicit fused multiply-adds; the policy has none.
FUSED_IN_EXP_AND_LOG = 30


def compiled(kernel, logits: str, constants: dict, arch: int, **options):
    types = {**POINTERS, "logits": f"*{logits}"}
    constants = {**SHAPE, **constants}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in constants},
    )
    options = {"num_warps": WARPS, "enable_fp_fusion": False, **options}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def check(arch: int, logits: str, lowest: float) -> None:
    tracker = {**TRACKER, "IDS": V, "STATES": 2}
    for kernel, constants in ((track_kernel, tracker), (policy_kernel, POLICY)):
        ptx = compiled(kernel, logits, constants, arch, maxnreg=REGISTERS).asm["ptx"]
        fused = len(re.findall(r"\bfma\.rn\.f64", ptx))
        assert fused == FUSED_IN_EXP_AND_LOG, f"{fused} fused multiply-adds in float64"
        assert "div.full.f64" not in ptx
        assert "atom.global.gpu.acq_rel.add" in ptx
        assert re.search(r"ld\.global[.\w]*\.v4", ptx), "logits are not read 16 bytes at a time"
    ptx = compiled(scale_kernel, logits, {"LOWEST": lowest}, arch).asm["ptx"]
    assert "div.rn.f32" in ptx
    assert not re.search(r"div\.(full|approx)", ptx), "a division is not exact"
    assert re.search(r"st\.global[.\w]*\.v4", ptx), "logits are not written 16 bytes at a time"


def main() -> None:
    for arch in map(int, sys.argv[1:]):
        check(arch, "fp32", 0.0)
        check(arch, "bf16", -3.3895e38)
        print(f"sm_{arch}: 3 kernels, 2 formats")


if __name__ == "__main__":
    main()
