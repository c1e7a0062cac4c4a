"""Attention of one token a row: both paths against float64, and the kernel where it runs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lab.pocket_reasoner.attention import attend, attend_masked

from tests.lab.attention_cases import DTYPES, check, make_case

ROOT = Path(__file__).parents[2]

needs_triton = pytest.mark.skipif(
    sys.platform != "linux" and importlib.util.find_spec("triton") is None,
    reason="Triton has no wheel for this platform",
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3])
def test_torch_against_float64(group, dtype):
    case = make_case([0, 1, 31, 32, 70, 99], 100, group=group, head_dim=32, dtype=dtype)
    case.poison(1e4)
    check(attend_masked(*case.inputs), case, rounds=True)


def test_a_cpu_takes_the_torch_path():
    case = make_case([0, 5, 9], 10)
    assert torch.equal(attend(*case.inputs), attend_masked(*case.inputs))


@needs_triton
def test_the_kernel_against_float64_under_the_interpreter():
    """The cases of interpreted_attention.py; the last line of the output says how many ran."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            "tests/lab/interpreted_attention.py",
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout.splitlines()[-1]
    assert "skipped" not in done.stdout.splitlines()[-1]


@needs_triton
@pytest.mark.parametrize("arch", [80, 90, 120])
def test_the_kernel_compiles_for_gpus(arch, tmp_path, monkeypatch):
    """Cells are read 16 bytes at a time, ahead of time."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from lab.pocket_reasoner.attention_kernel import BLOCK, STAGES, WARPS, attend_kernel
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sizes = {"KV": 2, "GROUP": 2, "GROUP_PAD": 2, "D": 64, "D_PAD": 64}
    constants = {**sizes, "BLOCK": BLOCK, "STAGES": STAGES}
    types = {"position": "*i64", "length": "i32", "scale": "fp32"}
    names = attend_kernel.arg_names
    source = ASTSource(
        fn=attend_kernel,
        signature={n: "constexpr" if n in constants else types.get(n, "*bf16") for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(5)},
    )
    options = {"num_warps": WARPS, "enable_fp_fusion": True}
    made = compiled(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert re.search(
        r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", made.asm["ptx"]
    )


@pytest.fixture
def _no_shortcuts():
    """Products of torch that add up in float32, as the bounds have it."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_bf16_reduced_precision_reduction")
    kept = {name: getattr(matmul, name) for name in names}
    for name in names:
        setattr(matmul, name, False)
    yield
    for name, value in kept.items():
        setattr(matmul, name, value)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("_no_shortcuts")
def test_the_kernel_on_a_gpu_and_in_a_graph(dtype):
    rows, length = 64, 700
    position = [(row * 271) % length for row in range(rows - 1)] + [length - 1]
    case = make_case(position, length, head_dim=64, dtype=dtype, device="cuda")
    case.poison(1e4)
    masked = attend_masked(*case.inputs)
    check(masked, case, rounds=True)
    case.poison(torch.nan)
    first = attend(*case.inputs)
    check(first, case, rounds=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(*case.inputs)
    graph.replay()
    assert torch.equal(captured, first)
    # The graph reads positions anew each time.
    case.position.copy_(case.position.flip(0))
    case.keys.nan_to_num_(0.5)
    case.values.nan_to_num_(0.5)
    graph.replay()
    check(captured, case, rounds=False)
