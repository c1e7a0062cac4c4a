"""Peak memory of quantising a sharded model, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.nvfp4r.sources import write_source

MB = 1 << 20
SHARDS = 6
SHARD_BYTES = 64 * MB
OUTPUT_SHARD_BYTES = 32 * MB
ALLOWANCE = 64 * MB
"""For the tensors in work in two threads, their quantised forms and the quantiser's temporaries."""

LIMIT = OUTPUT_SHARD_BYTES + ALLOWANCE  # the input costs a few tensors, not a shard

SCRIPT = """
import os, sys
os.cpu_count = lambda: 2  # as many tensors in work on any machine
from pathlib import Path
from safetensors.torch import load_file
from nvfp4r.convert import quantise_checkpoint

def peak():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])

source, output, hold, output_shard = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
method = sys.argv[5]
after_imports = peak()
held = {}
if hold == "hold":
    for file in sorted(source.glob("*.safetensors")):
        held |= {name: tensor.clone() for name, tensor in load_file(file).items()}
quantise_checkpoint(
    source, output, method=method, dialect="compressed-tensors", max_shard_bytes=output_shard
)
print(peak() - after_imports)
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs VmHWM of Linux"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """6 shards of 64 MB: 4 MB matrices that stay and 1 MB ones; q and k of one layer are apart."""
    tensors, shards = {}, []
    for shard in range(SHARDS):
        plain = [f"model.embed_part_{shard}_{i}.weight" for i in range(14)]
        tensors |= {name: torch.ones(2048, 1024, dtype=torch.bfloat16) for name in plain}
        fused = [
            f"model.layers.{shard}.self_attn.k_proj.weight",
            f"model.layers.{shard}.self_attn.v_proj.weight",
            f"model.layers.{shard}.self_attn.o_proj.weight",
            f"model.layers.{shard}.mlp.gate_proj.weight",
            f"model.layers.{shard}.mlp.up_proj.weight",
            f"model.layers.{shard}.mlp.down_proj.weight",
            f"model.layers.{(shard + 1) % SHARDS}.self_attn.q_proj.weight",
        ]
        tensors |= {name: torch.full((512, 1024), 0.5).bfloat16() for name in fused}
        padding = f"model.layers.{shard}.mlp.router.weight"
        tensors[padding] = torch.ones(512, 1024, dtype=torch.bfloat16)
        shards.append([*plain, *fused, padding])
    folder = write_source(tmp_path_factory.mktemp("memory") / "source", tensors, shards=shards)
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    assert len(sizes) == SHARDS
    assert all(abs(size - SHARD_BYTES) < MB for size in sizes)
    return folder


def peak_bytes(source: Path, output: Path, hold: str, method: str) -> int:
    arguments = [str(source), str(output), hold, str(OUTPUT_SHARD_BYTES), method]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.parametrize("method", ["rtn", "four-over-six", "brq"])
def test_about_one_shard_is_in_memory(source, tmp_path, method):
    """One output shard and the allowance, of a model four times that size."""
    peak = peak_bytes(source, tmp_path / "out", "stream", method)
    assert peak < LIMIT, f"{peak / MB:.0f} MB"


def test_the_measurement_sees_a_model_that_is_held(source, tmp_path):
    """The limit above means something: the same conversion beside the loaded model breaks it."""
    assert peak_bytes(source, tmp_path / "out", "hold", "rtn") > SHARDS * SHARD_BYTES >= 4 * LIMIT
