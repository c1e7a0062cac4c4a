"""NVFP4 in memory: bytes, tables and the tensor triple.

A matrix is stored as 4-bit codes (two per byte), one E4M3 scale per 16 columns and a float32 scale
for the whole matrix: `w = e2m1(code) * e4m3(block_scale) * global_scale`. The specification is
docs/format.md.

This module knows nothing about how the numbers were chosen (quantize.py), how files name them
(checkpoint/) or how a kernel wants them laid out (layout.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 16
"""Columns that share one block scale."""

E2M1_VALUES: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of codes 0..7; codes 8..15 are their negatives (code 8 is -0.0)."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9
"""Smallest positive E4M3 value (a subnormal, byte 0x01)."""


def row_chunks(
    rows: int, columns: int, device: torch.device = torch.device("cpu")
) -> Iterator[slice]:
    """Slices that cover `rows`, so small that temporaries made for one of them do not matter.

    In float64 a chunk takes 2 MiB on a CPU, which its cache holds, and 16 MiB elsewhere, where
    launching each step costs more than running it. A chunk has at least one row.
    """
    elements = 1 << 18 if device.type == "cpu" else 1 << 21
    step = max(1, elements // columns)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _require_codes(codes: Tensor, limit: int, what: str) -> None:
    if codes.dtype != torch.uint8:
        raise TypeError(f"{what}: got dtype {codes.dtype}, need torch.uint8")
    if limit < 255 and codes.numel() and int(codes.max()) > limit:
        raise ValueError(
            f"{what}: got a value of {int(codes.max())}, need 0..{limit}, one 4-bit code per "
            "element; call unpack_codes first if the codes are packed two per byte"
        )


def pack_codes(codes: Tensor) -> Tensor:
    """Packs 4-bit codes two per byte: the even column goes into the low nibble.

    Reads the largest value back to the host to check it.

    Args:
        codes: [..., K] uint8, values 0..15, K even.

    Returns:
        [..., K/2] uint8.

    Raises:
        TypeError: not uint8.
        ValueError: a value above 15, no dimension, or K odd.
    """
    _require_codes(codes, 15, "pack_codes")
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(
            f"pack_codes: got shape {list(codes.shape)}, need an even number of columns"
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """Inverse of `pack_codes`.

    Args:
        packed: [..., K/2] uint8.

    Returns:
        [..., K] uint8, values 0..15.

    Raises:
        TypeError: not uint8.
        ValueError: no dimension.
    """
    _require_codes(packed, 255, "unpack_codes")
    if packed.ndim == 0:
        raise ValueError("unpack_codes: got a scalar, need at least one dimension")
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def e2m1_table(device: torch.device) -> Tensor:
    """[16] float32, the value of every code; made on the device, so a CUDA graph may capture it."""
    code = torch.arange(16, device=device)
    exponent, mantissa = code >> 1 & 3, (code & 1).float()
    normal = torch.ldexp(1 + 0.5 * mantissa, exponent - 1)
    magnitude = torch.where(exponent == 0, 0.5 * mantissa, normal)
    return torch.where(code >= 8, -magnitude, magnitude)


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of 4-bit codes; exact in every floating dtype of 8 bits or more.

    Args:
        codes: uint8 of any shape, values 0..15 (unpacked).
        dtype: dtype of the result.

    Returns:
        Values in {0, 0.5, 1, 1.5, 2, 3, 4, 6} with sign, same shape; code 8 is -0.0.

    Raises:
        TypeError: not uint8.
        ValueError: a value above 15.

    Example:
        >>> decode_e2m1(unpack_codes(torch.tensor([0x21, 0x80], dtype=torch.uint8)))
        tensor([0.5000, 1.0000, 0.0000, -0.0000])
    """
    _require_codes(codes, 15, "decode_e2m1")
    return e2m1_table(codes.device)[codes.int()].to(dtype)


@dataclass(frozen=True, eq=False, repr=False)
class NVFP4Tensor:
    """One quantised matrix of N outputs and K inputs.

    Construction checks dtypes, shapes and devices only, so that opening a checkpoint reads no data;
    `validate` looks at the content.

    Attributes:
        codes: [N, K/2] uint8, two E2M1 codes per byte, even column in the low nibble.
        block_scale: [N, K/16] float8_e4m3fn, row-major, not negative.
        global_scale: [] or [N] float32 multiplier, > 0; one per row after fusing layers whose
            scales differ.
    """

    codes: Tensor
    block_scale: Tensor
    global_scale: Tensor

    def __post_init__(self) -> None:
        self._check_structure("NVFP4Tensor")

    def _check_structure(self, name: str) -> None:
        for field, dtype in (
            ("codes", torch.uint8),
            ("block_scale", torch.float8_e4m3fn),
            ("global_scale", torch.float32),
        ):
            tensor = getattr(self, field)
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{name}: {field} is a {type(tensor).__name__}, need a torch.Tensor"
                )
            if tensor.dtype != dtype:
                raise TypeError(f"{name}: {field} has dtype {tensor.dtype}, need {dtype}")
        codes, block_scale, global_scale = self.codes, self.block_scale, self.global_scale
        if codes.ndim != 2 or codes.numel() == 0:
            raise ValueError(
                f"{name}: codes has shape {list(codes.shape)}, need [N, K/2], not empty"
            )
        N, K = codes.shape[0], 2 * codes.shape[1]
        if K % BLOCK:
            raise ValueError(
                f"{name}: codes has shape {list(codes.shape)}, so K={K}, need a multiple of "
                f"{BLOCK}; a layer of this size must stay unquantised"
            )
        if tuple(block_scale.shape) != (N, K // BLOCK):
            hint = ""
            if block_scale.ndim == 2 and block_scale.shape[1] and not K % block_scale.shape[1]:
                group = K // block_scale.shape[1]
                hint = f"; this is group size {group}, export again with group size {BLOCK}"
            raise ValueError(
                f"{name}: block_scale has shape {list(block_scale.shape)}, need {[N, K // BLOCK]} "
                f"(K={K}, one scale per {BLOCK}){hint}"
            )
        if tuple(global_scale.shape) not in ((), (N,)):
            raise ValueError(
                f"{name}: global_scale has shape {list(global_scale.shape)}, need [] or [{N}] "
                "(one float32 multiplier, or one per output row)"
            )
        devices = {codes.device, block_scale.device, global_scale.device}
        if len(devices) > 1:
            raise ValueError(
                f"{name}: codes, block_scale and global_scale are on {codes.device}, "
                f"{block_scale.device} and {global_scale.device}, need one device; use .to()"
            )

    def __repr__(self) -> str:
        N, K = self.shape
        return (
            f"NVFP4Tensor(N={N}, K={K}, global_scale={list(self.global_scale.shape)}, "
            f"device={str(self.device)!r})"
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the matrix that is stored, not of the packed codes."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes, block scales and global scale together."""
        return self.codes.nbytes + self.block_scale.nbytes + self.global_scale.nbytes

    @property
    def bits_per_parameter(self) -> float:
        """Stored bits per matrix element, all scales included (4.5 for large matrices)."""
        N, K = self.shape
        return 8 * self.nbytes / (N * K)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix in full, [N, K] of `dtype`.

        `e2m1 * e4m3` is exact in float32; the product with `global_scale` is rounded once to
        float32 and then cast to `dtype`. Besides the result it holds a few MiB at a time.
        """
        N, K = self.shape
        codes = torch.arange(256, dtype=torch.uint8, device=self.device)
        # Both values of a byte side by side, looked up as one 8-byte element.  [256] int64
        pairs = e2m1_table(self.device)[unpack_codes(codes).int()].view(torch.int64)
        out = torch.empty((N, K), dtype=dtype, device=self.device)
        for rows in row_chunks(N, K, self.device):
            index = self.codes[rows].reshape(-1).int()
            values = pairs[index].view(torch.float32).view(-1, K // BLOCK, BLOCK)
            values *= self.block_scale[rows].float().unsqueeze(-1)
            values *= (
                self.global_scale
                if self.global_scale.ndim == 0
                else (self.global_scale[rows].view(-1, 1, 1))
            )
            out[rows] = values.view(-1, K)
        return out

    def validate(self, name: str) -> NVFP4Tensor:
        """Checks the content as well as the structure and returns the tensor itself.

        Args:
            name: what errors call the tensor, usually its module.

        Raises:
            TypeError: a dtype is wrong.
            ValueError: wrong shape or device; a global scale that is zero, negative, NaN or
                infinite; a block scale that is NaN (bytes 0x7F, 0xFF) or negative (sign bit set);
                a zero block scale over a block with a code other than 0 and -0. The message gives
                how many there are and where the first one is.
        """
        self._check_structure(name)
        bad = ~(torch.isfinite(self.global_scale) & (self.global_scale > 0))
        if bool(bad.any()):
            value = float(self.global_scale.reshape(-1)[bad.reshape(-1)][0])
            where = f" in {int(bad.sum())} of {bad.numel()} rows" if bad.ndim else ""
            raise ValueError(
                f"{name}: global_scale is {value}{where}, need a finite multiplier > 0; "
                "the checkpoint is damaged, quantise the layer again"
            )
        scale_bytes = self.block_scale.view(torch.uint8)  # [N, K/16]
        is_nan = (scale_bytes & 0x7F) == 0x7F
        _refuse_blocks(
            is_nan, name, "NaN block scales (0x7F or 0xFF)", "clamp to 448 before the E4M3 cast"
        )
        _refuse_blocks(
            (scale_bytes >= 0x80) & ~is_nan,
            name,
            "negative block scales (sign bit set)",
            "the sign of a weight belongs into its code, quantise the layer again",
        )
        zero_rows, zero_blocks = torch.nonzero(scale_bytes == 0, as_tuple=True)
        block_codes = self.codes.reshape(*scale_bytes.shape, BLOCK // 2)[zero_rows, zero_blocks]
        lost = ((block_codes & 0x77) != 0).any(-1)  # 0x77: without the signs
        lost_blocks = torch.zeros_like(is_nan)
        lost_blocks[zero_rows[lost], zero_blocks[lost]] = True
        _refuse_blocks(
            lost_blocks,
            name,
            "zero block scales over non-zero codes",
            "the block would read as zeros; clamp to 2**-9 before the E4M3 cast",
        )
        return self

    def to(self, device: torch.device | str) -> NVFP4Tensor:
        """The same matrix on `device`."""
        return NVFP4Tensor(
            self.codes.to(device), self.block_scale.to(device), self.global_scale.to(device)
        )

    @staticmethod
    def fuse(parts: Sequence[NVFP4Tensor]) -> NVFP4Tensor:
        """Stacks matrices along N, as engines do with q/k/v and gate/up.

        Every row keeps the global scale it was quantised with, so the result dequantises to exactly
        the stacked parts, also where their global scales differ.

        Args:
            parts: at least one tensor, all with the same K and device.

        Returns:
            A tensor of sum(N) rows with `global_scale` [sum(N)].

        Raises:
            ValueError: no parts, or K or device differ.
        """
        if not parts:
            raise ValueError("NVFP4Tensor.fuse: got no tensors, need at least one")
        if len({(part.shape[1], part.device) for part in parts}) > 1:
            got = ", ".join(f"K={part.shape[1]} on {part.device}" for part in parts)
            raise ValueError(f"NVFP4Tensor.fuse: got {got}; need one K and one device")
        scale_bytes = torch.cat([part.block_scale.view(torch.uint8) for part in parts])
        return NVFP4Tensor(
            torch.cat([part.codes for part in parts]),
            scale_bytes.view(torch.float8_e4m3fn),
            torch.cat([part.global_scale.expand(part.shape[0]) for part in parts]),
        )


def _refuse_blocks(bad: Tensor, name: str, what: str, remedy: str) -> None:
    """Raises ValueError if any entry of `bad` [N, K/16] is set."""
    count = int(bad.sum())
    if count:
        first = torch.nonzero(bad)[0].tolist()
        raise ValueError(
            f"{name}: {count} of {bad.numel()} {what}, first at [row, block] {first}; {remedy}"
        )


class PartitionScales:
    """Global scales of a fused layer, collected partition by partition.

    A checkpoint holds either one scale per partition or, for a tensor that was fused before it was
    quantised, a single one, which loaders hand over as partition 0. Slots that were never loaded
    hold NaN, whatever the memory held before, so they can neither be used nor win a maximum.

    Args:
        rows: output rows of each partition, in order.
        names: what errors call the partitions; their numbers by default.
        storage: [len(rows)] float32 buffer to use; overwritten.

    Raises:
        TypeError: storage is not float32.
        ValueError: no partition, a partition without rows, or sizes that do not match.
    """

    def __init__(
        self,
        rows: Sequence[int],
        *,
        names: Sequence[str] | None = None,
        storage: Tensor | None = None,
    ) -> None:
        if not rows or min(rows) < 1:
            raise ValueError(f"PartitionScales: got rows {list(rows)}, need one or more sizes >= 1")
        self.rows = tuple(rows)
        self.names = tuple(names) if names is not None else tuple(str(i) for i in range(len(rows)))
        if len(self.names) != len(self.rows):
            raise ValueError(
                f"PartitionScales: got {len(self.names)} names for {len(self.rows)} partitions"
            )
        if storage is None:
            storage = torch.empty(len(rows), dtype=torch.float32)
        if storage.dtype != torch.float32:
            raise TypeError(f"PartitionScales: storage has dtype {storage.dtype}, need float32")
        if tuple(storage.shape) != (len(rows),):
            raise ValueError(
                f"PartitionScales: storage has shape {list(storage.shape)}, need [{len(rows)}]"
            )
        self.values = storage.fill_(math.nan)

    def load(self, partition: int, value: float | Tensor) -> None:
        """Stores the scale of one partition.

        Args:
            partition: 0 .. len(rows)-1; 0 also for the only scale of a tensor fused beforehand.
            value: one number, finite and > 0, a multiplier.

        Raises:
            IndexError: no such partition.
            ValueError: more than one number, or zero, negative, NaN or infinite.
        """
        if not 0 <= partition < len(self.rows):
            raise IndexError(
                f"PartitionScales: got partition {partition}, need 0..{len(self.rows) - 1}"
            )
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"{self.names[partition]}: global_scale has shape {list(value.shape)}, "
                "need one number"
            )
        scale = torch.tensor(float(value), dtype=torch.float32)
        if not (bool(torch.isfinite(scale)) and bool(scale > 0)):
            raise ValueError(
                f"{self.names[partition]}: global_scale is {float(value)}, "
                "need a finite multiplier > 0"
            )
        self.values[partition] = scale

    def per_row(self) -> Tensor:
        """[sum(rows)] float32: the scale of every output row.

        A scale loaded for partition 0 alone is that of the whole layer and goes to all rows.

        Raises:
            ValueError: some partitions, or all, were not loaded; names them.
        """
        missing = torch.isnan(self.values).tolist()
        values = self.values
        if missing[0] is False and all(missing[1:]):
            values = values[:1].expand(len(self.rows))
        elif any(missing):
            names = ", ".join(name for name, gone in zip(self.names, missing, strict=True) if gone)
            raise ValueError(
                f"global_scale missing for {names}; need one per partition, or a single one for "
                "the whole fused layer. Is the checkpoint complete?"
            )
        repeats = torch.tensor(self.rows, device=values.device)
        return values.repeat_interleave(repeats)
