"""Packed weights: every bit where docs/layout.md puts it, and back again.

`documented_tiles` packs element by element, by the formulas of the document; `kernel_products`
reads tiles as kernels/decode.cuh does. Both are loops over Python integers and share nothing with
nvfp4r.packed.
"""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nvfp4r import reference
from nvfp4r.format import NVFP4Tensor, pack_codes, unpack_codes
from nvfp4r.packed import PackedWeight, pack, pack_, unpack
from nvfp4r.quantize import quantize

ORDERS = ["f16", "bf16"]
SHAPES = [(8, 16), (24, 48), (16, 128), (40, 144), (130, 448)]
SIGN = (15, 12, 14, 13)
MAGNITUDE = {"f16": (9, 6, 3, 0), "bf16": (6, 3, 0, 9)}
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}


def matrix(codes: Tensor, scale_bytes: Tensor, global_scale: float | Tensor = 1.0) -> NVFP4Tensor:
    """[N, K] codes and [N, K/16] E4M3 bytes as a tensor triple."""
    block_scale = scale_bytes.to(torch.uint8).view(torch.float8_e4m3fn)
    return NVFP4Tensor(
        pack_codes(codes.to(torch.uint8)), block_scale, torch.as_tensor(global_scale)
    )


def random_matrix(N: int, K: int, *, seed: int = 0, global_scale: float = 0.5) -> NVFP4Tensor:
    """Any code over any scale byte; scale 0 over codes 0 and 8 alone."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (N, K), generator=generator)
    scale_bytes = torch.randint(0, 0x7F, (N, K // 16), generator=generator)
    codes[(scale_bytes == 0).repeat_interleave(16, 1)] &= 8
    return matrix(codes, scale_bytes, global_scale)


def assert_same_matrix(got: NVFP4Tensor, expected: NVFP4Tensor) -> None:
    assert torch.equal(got.codes, expected.codes)
    assert torch.equal(got.block_scale.view(torch.uint8), expected.block_scale.view(torch.uint8))
    assert got.global_scale.shape == expected.global_scale.shape
    assert torch.equal(got.global_scale, expected.global_scale)


def e5m3(byte: int) -> int:
    """The scale byte of an E4M3 byte."""
    if byte == 0:
        return 0
    fraction, exponent = math.frexp(reference.e4m3(byte))
    m, x = 2 * fraction, exponent - 1
    return int((x + 22) * 8 + (m - 1) * 8)


def documented_tiles(weight: NVFP4Tensor, order: str) -> Tensor:
    """[T, J, 1152] uint8, element by element as sections 2 and 3 of docs/layout.md say."""
    N, K = weight.shape
    T, J = math.ceil(N / 16), math.ceil(K / 128)
    codes = unpack_codes(weight.codes).tolist()
    scale_bytes = weight.block_scale.view(torch.uint8).tolist()
    memory = bytearray(T * J * 1152)
    for n, k in product(range(N), range(K)):
        i, u, g = n // 16, n % 16 // 8, n % 8
        j, h, t = k // 128, k % 128 // 64, k % 64 // 16
        w, c, e = k % 16 // 4, k % 4 // 2, k % 2
        lane, p = 4 * g + t, 2 * c + u
        tile = (i * J + j) * 1152
        at = tile + 512 * h + 16 * lane + 4 * w
        (word,) = struct.unpack_from("<I", memory, at)
        word |= (codes[n][k] >> 3) << (16 * e + SIGN[p])
        word |= (codes[n][k] & 7) << (16 * e + MAGNITUDE[order][p])
        struct.pack_into("<I", memory, at, word)
        memory[tile + 1024 + 4 * lane + 2 * u + h] = e5m3(scale_bytes[n][k // 16])
    return torch.frombuffer(memory, dtype=torch.uint8).view(T, J, 1152)


def decode_word(v: int, order: str) -> list[int]:
    """Registers a[0..3] of kernels/decode.cuh."""
    if order == "bf16":
        a = [
            v & 0x81C081C0,
            (v << 3) & 0x81C081C0,
            ((v << 6) & 0x01C001C0) | ((v << 1) & 0x80008000),
            ((v >> 3) & 0x01C001C0) | ((v << 2) & 0x80008000),
        ]
    else:
        a = [
            v & 0x8E008E00,
            (v << 3) & 0x8E008E00,
            ((v << 6) & 0x0E000E00) | ((v << 1) & 0x80008000),
            ((v << 9) & 0x0E000E00) | ((v << 2) & 0x80008000),
        ]
    return a


def decode_scales(v: int, half: int, order: str) -> int:
    """Scales of rows g (low half) and g+8 (high half) of kernels/decode.cuh."""
    if order == "bf16":
        bits = (v & 0x00FF00FF) * 16 if half == 0 else (v & 0xFF00FF00) >> 4
        return bits + 0x6F806F80
    return (v & 0x00FF00FF) << 7 if half == 0 else (v & 0xFF00FF00) >> 1


def half_value(bits: int, order: str) -> float:
    """16 bits as fp16 or bf16."""
    assert 0 <= bits < 1 << 16
    if order == "bf16":
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    return struct.unpack("<e", struct.pack("<H", bits))[0]


def kernel_products(tiles: Tensor, order: str) -> Tensor:
    """[16 T, 128 J] float64: code times scale as a kernel multiplies them, before any factor."""
    T, J, _ = tiles.shape
    memory = bytes(tiles.flatten().tolist())
    out = torch.zeros(16 * T, 128 * J, dtype=torch.float64)
    for i, j, half, lane in product(range(T), range(J), range(2), range(32)):
        tile, g, t = (i * J + j) * 1152, lane // 4, lane % 4
        (scale_bytes,) = struct.unpack_from("<I", memory, tile + 1024 + 4 * lane)
        scales = decode_scales(scale_bytes, half, order)
        rows = [half_value(scales & 0xFFFF, order), half_value(scales >> 16, order)]
        words = struct.unpack_from("<4I", memory, tile + 512 * half + 16 * lane)
        for w, word in enumerate(words):
            column = 128 * j + 64 * half + 16 * t + 4 * w
            for register, a in enumerate(decode_word(word, order)):
                row, first = register % 2, column + 2 * (register // 2)
                for odd in (0, 1):
                    value = half_value((a >> 16 * odd) & 0xFFFF, order) * rows[row]
                    out[16 * i + g + 8 * row, first + odd] = value
    return out


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_every_byte_is_where_the_document_puts_it(N, K, order):
    weight = random_matrix(N, K)
    packed = pack(weight, order)
    assert torch.equal(packed.tiles, documented_tiles(weight, order))
    assert_same_matrix(unpack(packed), weight)


@pytest.mark.parametrize("order", ORDERS)
def test_code_bits_are_a_permutation(order):
    """Fifteen matrices give every bit of the tiles the number of the code bit that it holds.

    Thirteen set whole codes by one bit of their position, two set one half of the bits of all.
    """
    N, K = 32, 256
    scale_bytes = torch.full((N, K // 16), 0x38)
    position = torch.arange(N * K).view(N, K)
    sources = [15 * (position >> b & 1) for b in range(13)]
    sources += [torch.full((N, K), 0b1010), torch.full((N, K), 0b1100)]
    held = torch.zeros(2 * 2 * 1024, 8, dtype=torch.int64)
    for digit, codes in enumerate(sources):
        tiles = pack(matrix(codes, scale_bytes), order).tiles
        bits = tiles[..., :1024].reshape(-1, 1).int() >> torch.arange(8) & 1
        held += bits << (digit + 2 if digit < 13 else digit - 13)
    assert torch.equal(held.flatten().sort().values, torch.arange(4 * N * K))


def test_scale_bytes_are_a_permutation():
    """Two matrices whose block scales are the two digits of their position, base 32."""
    N, K = 32, 256
    position = torch.arange(N * K // 16).view(N, K // 16)
    codes = torch.full((N, K), 2)
    number = torch.zeros(4 * 128, dtype=torch.int64)
    digit_of = {e5m3(0x20 + digit): digit for digit in range(32)}
    for power, digit in ((1, position % 32), (32, position // 32)):
        tiles = pack(matrix(codes, 0x20 + digit), "f16").tiles
        number += power * torch.tensor([digit_of[b] for b in tiles[..., 1024:].flatten().tolist()])
    assert torch.equal(number.sort().values, torch.arange(4 * 128))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(4))
def test_random_matrices_come_back(seed, order):
    weight = random_matrix(32, 256, seed=seed)
    assert_same_matrix(unpack(pack(weight, order)), weight)


@pytest.mark.parametrize("order", ORDERS)
def test_k2_k3_every_code_and_scale_decodes_exactly(order):
    """16 codes in every place of a word, over all 127 scales; over scale 0 the two zeros."""
    rows, columns = torch.arange(16).view(-1, 1), torch.arange(127 * 16).view(1, -1)
    codes = (rows + columns) % 16
    scale_bytes = (torch.arange(127).view(1, -1) + 5 * rows) % 127
    codes[(scale_bytes == 0).repeat_interleave(16, 1)] &= 8
    weight = matrix(codes, scale_bytes)
    products = kernel_products(pack(weight, order).tiles, order)[:, : 127 * 16]
    assert torch.equal(products.to(DTYPES[order]).double(), products)  # nothing to round

    decoded = products * {"f16": 128.0, "bf16": 256.0}[order]
    truth = reference.dequantize(weight)
    assert torch.equal(decoded, truth)
    assert torch.equal(decoded.signbit(), truth.signbit())
    pairs = set(
        zip(
            codes.flatten().tolist(),
            scale_bytes.repeat_interleave(16, 1).flatten().tolist(),
            strict=True,
        )
    )
    assert len(pairs) == 126 * 16 + 2


def test_every_legal_scale_has_its_own_byte_and_others_are_refused():
    legal = {e5m3(byte): byte for byte in range(0x7F)}
    assert len(legal) == 0x7F
    packed = pack(matrix(torch.zeros(1, 16), torch.zeros(1, 1)), "f16")
    for byte in range(256):
        packed.tiles[0, 0, 1024] = byte
        if byte in legal:
            assert unpack(packed).block_scale.view(torch.uint8).item() == legal[byte]
        else:
            with pytest.raises(ValueError, match=r"1 of 1 scale bytes .* no E4M3 number"):
                unpack(packed)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_a7_padding_is_zero_and_never_read_back(N, K, order):
    """Whatever lies beside the source or in the target's memory; then with ones in all padding."""
    weight = random_matrix(N, K)
    beside = torch.full((N + 3, K), 0xFF, dtype=torch.uint8)
    codes, scale_bytes = beside[:N, : K // 2], beside.clone()[:N, : K // 16]
    codes.copy_(weight.codes)
    scale_bytes.copy_(weight.block_scale.view(torch.uint8))
    sliced = NVFP4Tensor(codes, scale_bytes.view(torch.float8_e4m3fn), weight.global_scale)
    assert not sliced.codes.is_contiguous() or N == 1

    packed = pack(weight, order)
    packed.tiles.fill_(0xFF)
    packed.alpha.fill_(math.nan)
    pack_(packed, sliced)
    assert torch.equal(packed.tiles, documented_tiles(weight, order))
    assert torch.equal(packed.alpha, torch.full((N,), 0.5))

    used = pack(matrix(torch.full((N, K), 15), torch.full((N, K // 16), 0x38)), order).tiles
    used[..., 1024:][used[..., 1024:] != 0] = 0xFF
    packed.tiles.bitwise_or_(~used)
    assert_same_matrix(unpack(packed), weight)


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
weight = tensor(16384, 4096)
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
    """A 38 MB matrix: the result and at most as much again."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT], capture_output=True, text=True, check=True
    )
    packing, unpacking = map(float, done.stdout.split())
    assert 1.0 <= packing < 2.0
    assert unpacking < 2.0


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("N", "K"), [*SHAPES, (4100, 1040)])
def test_a_gpu_packs_the_same_bytes(N, K, order):
    weight = random_matrix(N, K)
    packed = pack(weight.to("cuda"), order)
    expected = pack(weight, order)
    assert packed.device.type == "cuda"
    assert torch.equal(packed.tiles.cpu(), expected.tiles)
    assert torch.equal(packed.alpha.cpu(), expected.alpha)
    assert_same_matrix(unpack(packed).to("cpu"), weight)


@pytest.mark.gpu
def test_a_gpu_needs_little_memory_beside_the_result():
    weight = random_matrix(51200, 5120).to("cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    packed = pack(weight, "f16")
    assert torch.cuda.max_memory_allocated() - before < 3 * packed.nbytes


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
    with pytest.raises(TypeError, match="q_proj: the target is a .*, need a PackedWeight"):
        pack_(target, WEIGHT, name="q_proj")
    with pytest.raises(TypeError, match="unpack: got a .*, need a PackedWeight"):
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
