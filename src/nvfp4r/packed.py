"""The order in which this project's kernels read a matrix: tiles of 16 rows x 128 columns.

A packed weight holds the same codes and block scales as NVFP4Tensor, in other places and, for the
scales, other bits; packing loses nothing. docs/layout.md is the specification.

This module moves bits, on a CPU or a GPU. It knows nothing of files, and nothing of the kernels
beyond where they look; layout.py has the orders of other people's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4r.format import BLOCK, NVFP4Tensor, row_chunks

Order = Literal["f16", "bf16"]
"""Order of the bits of a word; that of the activations' dtype."""

ORDERS: Mapping[torch.dtype, Order] = {torch.bfloat16: "bf16", torch.float16: "f16"}
"""Dtypes of activations that weights can be packed for, and the order for each."""

TILE_ROWS = 16
TILE_COLUMNS = 128
TILE_BYTES = 1152
CODE_BYTES = TILE_ROWS * TILE_COLUMNS // 2

# Where the four codes of 16 bits have their sign and the lowest bit of their magnitude. Planes 0
# and 2 are row g, 1 and 3 row g+8; 0 and 1 the first two columns of a word, 2 and 3 the others.
SIGN_BITS = (15, 12, 14, 13)
MAGNITUDE_BITS: dict[Order, tuple[int, ...]] = {"f16": (9, 6, 3, 0), "bf16": (6, 3, 0, 9)}

E5M3_OFFSET = 22
"""What a scale's exponent has added to it in bits 7:3 of its byte."""

# A float32 shifted down to 3 bits of mantissa is an E5M3 byte with this added, their biases apart.
_FLOAT32_ABOVE_E5M3 = (127 - E5M3_OFFSET) << 3


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight:
    """One quantised matrix of N outputs and K inputs, as the kernels read it.

    Construction checks dtypes, shapes and devices and reads no data. `pack` makes one, `pack_`
    writes a new matrix into it.

    Attributes:
        tiles: [ceil(N/16), ceil(K/128), 1152] uint8, contiguous.
        alpha: [N] float32, the global scale of every row, contiguous.
        N: outputs, >= 1.
        K: inputs, a positive multiple of 16.
        order: "f16" for float16 activations, "bf16" for bfloat16.

    Raises:
        TypeError: a part of a wrong type or dtype.
        ValueError: sizes, shapes, order or devices that do not fit, or tensors not contiguous.
    """

    tiles: Tensor
    alpha: Tensor
    N: int
    K: int
    order: Order

    def __post_init__(self) -> None:
        _require_order(self.order, "PackedWeight")
        if self.N < 1 or self.K < 1 or self.K % BLOCK:
            raise ValueError(
                f"PackedWeight: got N={self.N}, K={self.K}, need N >= 1 and K a positive multiple "
                f"of {BLOCK}"
            )
        for field, dtype, shape in (
            ("tiles", torch.uint8, _tiles_shape(self.N, self.K)),
            ("alpha", torch.float32, (self.N,)),
        ):
            tensor = getattr(self, field)
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"PackedWeight: {field} is a {type(tensor).__name__}, need a torch.Tensor"
                )
            if tensor.dtype != dtype:
                raise TypeError(f"PackedWeight: {field} has dtype {tensor.dtype}, need {dtype}")
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"PackedWeight: {field} has shape {list(tensor.shape)}, need {list(shape)} "
                    f"(N={self.N}, K={self.K})"
                )
            if not tensor.is_contiguous():
                raise ValueError(
                    f"PackedWeight: {field} is not contiguous, kernels need it so; "
                    "call .contiguous()"
                )
        if self.tiles.device != self.alpha.device:
            raise ValueError(
                f"PackedWeight: tiles and alpha are on {self.tiles.device} and "
                f"{self.alpha.device}, need one device; use .to()"
            )

    def __repr__(self) -> str:
        return (
            f"PackedWeight(N={self.N}, K={self.K}, order={self.order!r}, "
            f"device={str(self.device)!r})"
        )

    @property
    def device(self) -> torch.device:
        return self.tiles.device

    @property
    def nbytes(self) -> int:
        """Bytes of tiles and alpha together, padding included."""
        return self.tiles.nbytes + self.alpha.nbytes

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same matrix on `device`."""
        return PackedWeight(
            self.tiles.to(device), self.alpha.to(device), self.N, self.K, self.order
        )


def pack(weight: NVFP4Tensor, order: Order, *, name: str = "weight") -> PackedWeight:
    """Puts a matrix into the order of the kernels, on its own device.

    Works through a few MiB at a time, after checking the content, which takes about a third of the
    result's size (more if many block scales are 0) and waits for the device.

    Args:
        weight: N outputs, K inputs; validated here. It is not changed and shares no memory with
            the result.
        order: "f16" for float16 activations, "bf16" for bfloat16.
        name: what errors call the weight, usually its module.

    Returns:
        The packed matrix; `unpack` is the inverse.

    Raises:
        TypeError: not an NVFP4Tensor; in particular one that is packed already.
        ValueError: an unknown order, or an unsound weight (NVFP4Tensor.validate): NaN or negative
            scales have no byte in this layout.

    Example:
        >>> from nvfp4r.quantize import quantize
        >>> packed = pack(quantize(torch.ones(24, 48)), "f16")
        >>> packed.tiles.shape
        torch.Size([2, 1, 1152])
        >>> torch.equal(unpack(packed).dequantize(), torch.ones(24, 48))
        True
    """
    _require_order(order, name)
    _require_sound(weight, name)
    N, K = weight.shape
    with torch.inference_mode(False):  # `pack_` may write here later, in any mode
        tiles = torch.empty(_tiles_shape(N, K), dtype=torch.uint8, device=weight.device)
        alpha = torch.empty(N, dtype=torch.float32, device=weight.device)
    packed = PackedWeight(tiles, alpha, N, K, order)
    _write(packed, weight)
    return packed


def pack_(packed: PackedWeight, weight: NVFP4Tensor, *, name: str = "weight") -> None:
    """Writes another matrix of the same size into `packed`, at its addresses and in its order.

    Captured graphs that read `packed` see the new matrix; nothing of the old one survives. Checked
    before anything is written.

    Args:
        packed: where to write.
        weight: of the same N, K and device; validated here.
        name: what errors call the weight, usually its module.

    Raises:
        TypeError: not a PackedWeight and an NVFP4Tensor.
        ValueError: another size or device, or an unsound weight.
    """
    if not isinstance(packed, PackedWeight):
        raise TypeError(
            f"{name}: the target is a {type(packed).__name__}, need a PackedWeight; make one with "
            "pack"
        )
    _require_sound(weight, name)
    if weight.shape != (packed.N, packed.K):
        raise ValueError(
            f"{name}: new weight has [N, K] {list(weight.shape)}, need {[packed.N, packed.K]}; "
            "pack another size anew"
        )
    if weight.device != packed.device:
        raise ValueError(
            f"{name}: new weight is on {weight.device}, need {packed.device} like the packed one; "
            "use .to()"
        )
    _write(packed, weight)


def unpack(packed: PackedWeight) -> NVFP4Tensor:
    """Inverse of `pack`: the same codes, block scale bytes and global scales, bit for bit.

    Padding is dropped unread. Works through a few MiB at a time and waits for the device.

    Args:
        packed: N outputs, K inputs.

    Returns:
        The matrix, row-major, sharing no memory. `global_scale` is [] where all rows have the same
        one, as files hold it, else [N].

    Raises:
        TypeError: not a PackedWeight.
        ValueError: scale bytes that stand for no E4M3 number: the tiles were overwritten.
    """
    if not isinstance(packed, PackedWeight):
        raise TypeError(f"unpack: got a {type(packed).__name__}, need a PackedWeight")
    N, K = packed.N, packed.K
    codes = torch.empty((N, K // 2), dtype=torch.uint8, device=packed.device)
    scale_bytes = torch.empty((N, K // BLOCK), dtype=torch.uint8, device=packed.device)
    unknown = torch.zeros((), dtype=torch.int64, device=packed.device)
    for tiles, rows in _chunks(packed):
        count = rows.stop - rows.start
        codes[rows] = _codes_of(tiles, packed.order)[:count, : K // 2]
        encoded = _scale_bytes_of(tiles)[:count, : K // BLOCK]
        block_scale = _scales_of_e5m3(encoded)
        unknown += (_e5m3_of_scales(block_scale) != encoded).sum()
        scale_bytes[rows] = block_scale.view(torch.uint8)
    if int(unknown):
        raise ValueError(
            f"unpack: {int(unknown)} of {scale_bytes.numel()} scale bytes of {packed} stand for no "
            "E4M3 number; the tiles were overwritten, pack the weight again"
        )
    first = packed.alpha[0]
    is_shared = bool((packed.alpha == first).all())
    return NVFP4Tensor(
        codes,
        scale_bytes.view(torch.float8_e4m3fn),
        first.clone() if is_shared else packed.alpha.clone(),
    )


def unpacked_chunks(packed: PackedWeight) -> Iterator[tuple[NVFP4Tensor, slice]]:
    """The matrix row range by row range, with a global scale of 1 instead of `alpha`.

    Bounded memory; checks nothing and does not wait for the device, so a CUDA graph may capture it.

    Returns:
        (codes and block scales of some rows, which rows).
    """
    one = torch.ones((), dtype=torch.float32, device=packed.device)
    for tiles, rows in _chunks(packed):
        count = rows.stop - rows.start
        codes = _codes_of(tiles, packed.order)[:count, : packed.K // 2]
        scales = _scales_of_e5m3(_scale_bytes_of(tiles)[:count, : packed.K // BLOCK])
        yield NVFP4Tensor(codes, scales, one), rows


def _tiles_shape(N: int, K: int) -> tuple[int, int, int]:
    return -(-N // TILE_ROWS), -(-K // TILE_COLUMNS), TILE_BYTES


def _require_order(order: str, name: str) -> None:
    if order not in get_args(Order):
        raise ValueError(f"{name}: order is {order!r}, need one of {get_args(Order)}")


def _require_sound(weight: NVFP4Tensor, name: str) -> None:
    if isinstance(weight, PackedWeight):
        raise TypeError(f"{name}: got {weight}, which is packed already; unpack it first")
    if not isinstance(weight, NVFP4Tensor):
        raise TypeError(f"{name}: got a {type(weight).__name__}, need an NVFP4Tensor")
    weight.validate(name)


def _chunks(packed: PackedWeight) -> Iterator[tuple[Tensor, slice]]:
    """Some tiles and the rows of the matrix in them, chunk by chunk."""
    T, J, _ = packed.tiles.shape
    for chunk in row_chunks(T, J * TILE_ROWS * TILE_COLUMNS, packed.device):
        rows = slice(chunk.start * TILE_ROWS, min(packed.N, chunk.stop * TILE_ROWS))
        yield packed.tiles[chunk], rows


def _write(packed: PackedWeight, weight: NVFP4Tensor) -> None:
    """Every byte of `packed`, padding included."""
    with torch.no_grad():
        for tiles, rows in _chunks(packed):
            tiles[..., :CODE_BYTES] = _code_bytes(weight.codes[rows], tiles, packed.order)
            tiles[..., CODE_BYTES:] = _scale_bytes(weight.block_scale[rows], tiles)
        # Last: a kernel may read tiles, but never alpha, before the operation just ahead of it on
        # the stream has ended (programmatic dependent launch).
        packed.alpha.copy_(weight.global_scale)


def _padded(rows: Tensor, tiles: Tensor, columns: int) -> Tensor:
    """`rows` [n, c] with zeros up to whole tiles, `columns` of them in each."""
    T, J, _ = tiles.shape
    return F.pad(rows, (0, J * columns - rows.shape[1], 0, T * TILE_ROWS - rows.shape[0]))


def _code_bytes(codes: Tensor, tiles: Tensor, order: Order) -> Tensor:
    """[n, K/2] codes as the first bytes of `tiles` [T, J, 1152]: [T, J, 1024] uint8."""
    T, J, _ = tiles.shape
    pairs = _padded(codes, tiles, TILE_COLUMNS // 2).reshape(T, 2, 8, J, 2, 4, 4, 2).int()
    pairs = (pairs | pairs << 12) & 0x000F000F  # even column in bits 3:0, odd in 19:16
    words = torch.zeros((T, 8, J, 2, 4, 4), dtype=torch.int32, device=codes.device)
    for plane, (sign, magnitude) in enumerate(zip(SIGN_BITS, MAGNITUDE_BITS[order], strict=True)):
        code = pairs[:, plane % 2, ..., plane // 2]  # [T, g, J, h, t, w]
        words |= (code & 0x00080008) << (sign - 3) | (code & 0x00070007) << magnitude
    lanes = words.permute(0, 2, 3, 1, 4, 5).contiguous()  # [T, J, h, g, t, w]
    return lanes.view(torch.uint8).view(T, J, CODE_BYTES)


def _codes_of(tiles: Tensor, order: Order) -> Tensor:
    """Inverse of `_code_bytes`: [16 T, 64 J] uint8."""
    T, J, _ = tiles.shape
    lanes = tiles[..., :CODE_BYTES].clone(memory_format=torch.contiguous_format)
    words = lanes.view(torch.int32).view(T, J, 2, 8, 4, 4)
    planes = []
    for sign, magnitude in zip(SIGN_BITS, MAGNITUDE_BITS[order], strict=True):
        pairs = (words >> (sign - 3) & 0x00080008) | (words >> magnitude & 0x00070007)
        planes.append(((pairs | pairs >> 12) & 0xFF).to(torch.uint8))
    codes = torch.stack(planes, dim=-1).view(T, J, 2, 8, 4, 4, 2, 2)  # [T, J, h, g, t, w, c, u]
    return codes.permute(0, 7, 3, 1, 2, 4, 5, 6).reshape(T * TILE_ROWS, J * TILE_COLUMNS // 2)


def _scale_bytes(block_scale: Tensor, tiles: Tensor) -> Tensor:
    """[n, K/16] scales as the last bytes of `tiles` [T, J, 1152]: [T, J, 128] uint8."""
    T, J, _ = tiles.shape
    padded = _padded(_e5m3_of_scales(block_scale), tiles, TILE_COLUMNS // BLOCK)
    lanes = padded.reshape(T, 2, 8, J, 2, 4).permute(0, 3, 2, 5, 1, 4)  # [T, J, g, t, u, h]
    return lanes.reshape(T, J, TILE_BYTES - CODE_BYTES)


def _scale_bytes_of(tiles: Tensor) -> Tensor:
    """Inverse of `_scale_bytes`, without decoding: [16 T, 8 J] uint8."""
    T, J, _ = tiles.shape
    lanes = tiles[..., CODE_BYTES:].view(T, J, 8, 4, 2, 2)
    rows = lanes.permute(0, 4, 2, 1, 5, 3)  # [T, u, g, J, h, t]
    return rows.reshape(T * TILE_ROWS, J * (TILE_COLUMNS // BLOCK))


def _e5m3_of_scales(block_scale: Tensor) -> Tensor:
    """E5M3 bytes of float8_e4m3fn scales >= 0."""
    bits = block_scale.float().view(torch.int32)
    return ((bits >> 20) - _FLOAT32_ABOVE_E5M3).clamp(min=0).to(torch.uint8)


def _scales_of_e5m3(scale_bytes: Tensor) -> Tensor:
    """float8_e4m3fn scales of E5M3 bytes, rounded where E4M3 has no such number: 2^-22 to 0."""
    bits = (scale_bytes.int() + _FLOAT32_ABOVE_E5M3) << 20
    return bits.view(torch.float32).to(torch.float8_e4m3fn)
