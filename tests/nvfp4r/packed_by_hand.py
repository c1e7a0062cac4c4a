"""Packed weights element by element, for tests: written and read by loops over Python integers.

`documented_tiles` packs by the formulas of docs/layout.md; `kernel_products` reads tiles as
kernels/decode.cuh does. They share nothing with nvfp4r.packed.
"""

from __future__ import annotations

import math
import struct
from itertools import product

import torch
from torch import Tensor

from nvfp4r import reference
from nvfp4r.format import NVFP4Tensor, pack_codes, unpack_codes

ORDERS = ["f16", "bf16"]
FACTORS = {"f16": 128.0, "bf16": 256.0}
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
SIGN = (15, 12, 14, 13)
MAGNITUDE = {"f16": (9, 6, 3, 0), "bf16": (6, 3, 0, 9)}


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
