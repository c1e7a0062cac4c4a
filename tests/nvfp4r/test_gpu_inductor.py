"""Between kernels of torch.compile that start early (TORCHINDUCTOR_ENABLE_PDL=1).

make test-gpu
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

# Every layer ends with a sum whose kernel follows ours and reads what the one before ours wrote.
PROGRAM = """
import sys
import torch
from nvfp4r import quantize
from nvfp4r.jit.module import inductor_starts_early
from nvfp4r.ops import linear
from nvfp4r.packed import pack

assert inductor_starts_early()
torch.manual_seed(0)
N = K = 4096
layers = [pack(quantize(torch.randn(N, K, device="cuda")), "bf16") for _ in range(4)]

def chain(x):
    for one in layers:
        a = torch.nn.functional.silu(x) * 1.5
        x = a + 1e-2 * linear(a, one.tiles, one.alpha, None, None, N, K, "bf16")
    return x

for M in (1, 8, 40, 300):
    x = torch.randn(M, K, device="cuda").bfloat16()
    with torch._inductor.config.patch({"triton.enable_pdl": False}):
        torch._dynamo.reset()
        expected = torch.compile(chain)(x)
    torch._dynamo.reset()
    compiled = torch.compile(chain)
    compiled(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = compiled(x)
    for _ in range(500):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, expected), M
print("equal")
"""


def test_compiled_kernels_around_ours_give_the_same_bits(tmp_path):
    environment = {
        **os.environ,
        "TORCHINDUCTOR_ENABLE_PDL": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("equal\n")
