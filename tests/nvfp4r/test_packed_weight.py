"""A packed weight as an object: scales of fused layers, loading again, memory, refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nvfp4r import reference
from nvfp4r.format import NVFP4Tensor
from nvfp4r.packed import PackedWeight, pack, pack_, unpack
from nvfp4r.quantize import quantize
from tests.nvfp4r.packed_by_hand import ORDERS, assert_same_matrix, random_matrix


@pytest.mark.parametrize("order", ORDERS)
def test_a2_fused_layers_keep_their_global_scales(order):
    gate = quantize(torch.randn(24, 64, generator=torch.Generator().manual_seed(0)))
    gate = NVFP4Tensor(gate.codes, gate.block_scale, torch.tensor(3.85e-5))
    up = NVFP4Tensor(gate.codes, gate.block_scale, torch.tensor(4.83e-5))
    fused = NVFP4Tensor.fuse([gate, up])
    packed = pack(fused, order)
    assert packed.alpha.tolist() == [float(gate.global_scale)] * 24 + [float(up.global_scale)] * 24
    assert float(packed.alpha[-1] / packed.alpha[0]) == pytest.approx(1.2545, abs=1e-3)
    assert_same_matrix(unpack(packed), fused)


def test_rows_with_one_global_scale_come_back_as_a_single_one():
    part = random_matrix(16, 32)
    fused = NVFP4Tensor.fuse([part, part])
    back = unpack(pack(fused, "f16"))
    assert back.global_scale.shape == ()
    assert torch.equal(reference.dequantize(back), reference.dequantize(fused))


@pytest.mark.parametrize("order", ORDERS)
def test_a12_a_second_load_writes_in_place_and_leaves_nothing_of_the_first(order):
    packed = pack(random_matrix(40, 144, seed=1), order)
    addresses = packed.tiles.data_ptr(), packed.alpha.data_ptr()
    for new in (random_matrix(40, 144, seed=2, global_scale=1.0), random_matrix(40, 144, seed=1)):
        pack_(packed, new)
        fresh = pack(new, order)
        assert torch.equal(packed.tiles, fresh.tiles)
        assert torch.equal(packed.alpha, fresh.alpha)
        assert (packed.tiles.data_ptr(), packed.alpha.data_ptr()) == addresses


def test_the_result_shares_no_memory_with_the_source():
    weight = NVFP4Tensor.fuse([random_matrix(16, 32), random_matrix(16, 32, global_scale=2.0)])
    packed = pack(weight, "f16")
    back = unpack(packed)
    copy = packed.alpha.clone()
    weight.global_scale.zero_()
    back.global_scale.zero_()
    assert torch.equal(packed.alpha, copy)


def test_packed_in_inference_mode_and_loaded_again_outside():
    with torch.inference_mode():
        packed = pack(random_matrix(16, 32, seed=1), "f16")
    weight = random_matrix(16, 32, seed=2)
    pack_(packed, weight)
    assert_same_matrix(unpack(packed), weight)


def test_sizes_and_moving():
    packed = pack(random_matrix(40, 144), "bf16")
    assert packed.tiles.shape == (3, 2, 1152)
    assert packed.nbytes == 3 * 2 * 1152 + 4 * 40
    assert repr(packed) == "PackedWeight(N=40, K=144, order='bf16', device='cpu')"
    moved = packed.to("meta")
    assert moved.device == torch.device("meta")
    assert (moved.N, moved.K, moved.order) == (40, 144, "bf16")


MEMORY_SCRIPT = """
import torch
from nvfp4r.format import NVFP4Tensor
from nvfp4r.packed import pack, unpack

def resident(field):
    status = open("/proc/self/status").read()
    return 1024 * int(status.split(field + ":")[1].split()[0])

def tensor(N, K):
    codes = torch.full((N, K // 2), 0x22, dtype=torch.uint8)
    scales = torch.full((N, K // 16), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return NVFP4Tensor(codes, scales, torch.tensor(1.0))

torch.set_num_threads(1)
unpack(pack(tensor(16, 128), "f16"))  # what torch allocates once
weight = tensor(32768, 4096)
before = resident("VmRSS")
assert resident("VmHWM") - before < 1 << 20
packed = pack(weight, "f16")
print((resident("VmHWM") - before) / packed.nbytes)
del weight
before = resident("VmRSS")
unpack(packed)
print((resident("VmHWM") - before) / packed.nbytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs VmHWM of Linux")
def test_temporaries_are_small():
    """A 75 MB matrix: the result and at most as much again."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT], capture_output=True, text=True, check=True
    )
    packing, unpacking = map(float, done.stdout.split())
    assert 1.0 <= packing < 2.0
    assert unpacking < 2.0


@pytest.mark.gpu
def test_temporaries_are_small_on_a_gpu():
    N, K = 51200, 5120
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device="cuda")
    scale_bytes = torch.randint(1, 0x7F, (N, K // 16), dtype=torch.uint8, device="cuda")
    weight = NVFP4Tensor(
        codes, scale_bytes.view(torch.float8_e4m3fn), torch.ones((), device="cuda")
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    packed = pack(weight, "f16")
    assert torch.cuda.max_memory_allocated() - before < 2 * packed.nbytes


WEIGHT = random_matrix(40, 144)
PACKED = pack(WEIGHT, "f16")


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (PACKED, r"q_proj: got PackedWeight\(N=40, .*packed already; unpack it first"),
        (torch.zeros(16, 32), "q_proj: got a Tensor, need an NVFP4Tensor"),
    ],
)
@pytest.mark.parametrize(
    "load", [lambda w: pack(w, "f16", name="q_proj"), lambda w: pack_(PACKED, w, name="q_proj")]
)
def test_other_types_are_refused(load, weight, message):
    with pytest.raises(TypeError, match=message):
        load(weight)


@pytest.mark.parametrize("target", [WEIGHT, PACKED.tiles])
def test_loading_into_something_else_is_refused(target):
    with pytest.raises(TypeError, match=r"q_proj: the target is a .*, need a PackedWeight"):
        pack_(target, WEIGHT, name="q_proj")
    with pytest.raises(TypeError, match=r"unpack: got a .*, need a PackedWeight"):
        unpack(target)


@pytest.mark.parametrize("order", ["fp16", "", None, torch.float16])
def test_unknown_orders_are_refused(order):
    with pytest.raises(ValueError, match=r"q_proj: order is .*, need one of \('f16', 'bf16'\)"):
        pack(WEIGHT, order, name="q_proj")


@pytest.mark.parametrize(
    ("byte", "message"),
    [(0x7F, "q_proj: .*NaN block scales"), (0xB8, "q_proj: .*negative block scales")],
)
def test_scales_without_a_byte_are_refused_before_anything_is_written(byte, message):
    weight = random_matrix(40, 144, seed=1)
    weight.block_scale.view(torch.uint8)[3, 5] = byte
    packed = pack(WEIGHT, "f16")
    with pytest.raises(ValueError, match=message):
        pack(weight, "f16", name="q_proj")
    with pytest.raises(ValueError, match=message):
        pack_(packed, weight, name="q_proj")
    assert_same_matrix(unpack(packed), WEIGHT)


def test_loading_another_size_or_device_is_refused():
    with pytest.raises(ValueError, match=r"q_proj: new weight has \[N, K\] \[40, 128\], need"):
        pack_(PACKED, random_matrix(40, 128), name="q_proj")
    with pytest.raises(ValueError, match="q_proj: new weight is on cpu, need meta"):
        pack_(PACKED.to("meta"), WEIGHT, name="q_proj")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tiles": PACKED.tiles.int()}, TypeError, "tiles has dtype torch.int32"),
        ({"tiles": PACKED.tiles[:2]}, ValueError, r"tiles has shape .*, need \[3, 2, 1152\]"),
        ({"tiles": None}, TypeError, "tiles is a NoneType"),
        (
            {"tiles": PACKED.tiles.mT.contiguous().mT},
            ValueError,
            "tiles is not contiguous",
        ),
        ({"alpha": PACKED.alpha.double()}, TypeError, "alpha has dtype torch.float64"),
        ({"alpha": PACKED.alpha[0]}, ValueError, r"alpha has shape \[\], need \[40\]"),
        ({"alpha": PACKED.alpha.to("meta")}, ValueError, "tiles and alpha are on cpu and meta"),
        ({"N": 0}, ValueError, "got N=0"),
        ({"K": 136}, ValueError, "K=136"),
        ({"order": "fp16"}, ValueError, "order is 'fp16'"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, error, message):
    parts = {"tiles": PACKED.tiles, "alpha": PACKED.alpha, "N": 40, "K": 144, "order": "f16"}
    with pytest.raises(error, match=f"PackedWeight: .*{message}"):
        PackedWeight(**{**parts, **change})
