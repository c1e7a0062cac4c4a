"""The NVFP4 linear layer as a torch module: 4-bit weights, activations as they are or emulated.

Without activation quantisation it computes what `torch.nn.Linear` computes with the dequantised
matrix, bit for bit. With it (W4A4) it emulates the tensor-core product: exact E2M1 x E4M3 values on
both sides, float32 accumulation, scales and bias in float32, one rounding to the output dtype.
A rotated layer turns blocks of 16 inputs first, in float32 (methods/rotation.py).

A layer may be packed: then it holds the weight once, in the order of the CUDA kernels, and leaves
the arithmetic to the ops, on every device.

This module knows nothing of models or files; hf/ places these layers. Nor of kernels: ops.py
chooses them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4r.checkpoint.dialects import Activations
from nvfp4r.format import BLOCK, NVFP4Tensor
from nvfp4r.linear_checks import check_rotation, check_same_part, check_vectors
from nvfp4r.methods.rotation import Rotation
from nvfp4r.ops import linear as linear_op
from nvfp4r.ops import quantize as quantize_op
from nvfp4r.ops import rotated
from nvfp4r.packed import ORDERS, PackedWeight, pack, pack_, unpack
from nvfp4r.quantize import quantize_activations

_PACKING = "packing"  # key in the metadata of a state dict

_log = logging.getLogger(__name__)


class NVFP4Linear(nn.Module):
    """`y = x @ W.T + bias` with W stored in NVFP4, for inference.

    Nothing in `forward` waits for an accelerator. Weights change through `load_` or
    `load_state_dict`; both also rewrite a dequantised copy in place, so captured graphs stay valid.
    Casting the module (`.to(torch.float16)`) casts the bias alone: the stored weight keeps its
    dtypes, and the matrix is dequantised to the dtype of `x`.

    `pack_` makes it a packed layer, which holds 0.56 bytes per weight and no dequantised copy, and
    computes with `torch.ops.nvfp4r.linear`: on a GPU that the kernels are built for, up to 192
    tokens at a time, and any number on compute capability 9.0, read nothing but the packed weight.
    Its results are exact products of `x` and the 4-bit weights, float32 sums, scales and bias in
    float32, one rounding; without `pack_`, W4A16 rounds each weight to the dtype of `x` first. The
    two differ by these roundings alone. No gradients flow through a packed layer.

    Args:
        weight: N outputs, K inputs; validated here.
        bias: [N] floating point, or None.
        input_scale: float32 [], global scale of the activations; needed for activations="nvfp4".
        activations: "none" (W4A16) or "nvfp4" (W4A4, static `input_scale`).
        keep_dequantized: keep the matrix after first use, in the dtype of `x` ("none") or in
            float32 ("nvfp4"), for 2 or 4 bytes per weight; otherwise dequantise in every call.
            Without meaning once the layer is packed.
        name: what logs and errors call the layer.
        rotation: of `x` before all else, for a weight that is stored rotated along K: rounded once
            to the dtype of `x` ("none"), or not before it is quantised ("nvfp4"). `input_scale` is
            that of rotated inputs.

    Attributes:
        saturated_blocks: int64 [], blocks of 16 activations that were clipped so far.
        rotated_columns: uint8 [], 16, in rotated layers alone: no state goes from a rotated layer
            to another one, or back.
        packed_dtype: what the layer is packed for, torch.bfloat16 or torch.float16; None if it is
            not. Buffers `tiles` and `alpha` (docs/layout.md) then take the place of `codes`,
            `block_scale` and `global_scale`, in state dicts too.

    Raises:
        TypeError: `bias` or `input_scale` of a wrong dtype.
        ValueError: unsound weight, shapes that do not fit, an `input_scale` that is missing, zero,
            negative, NaN or infinite, or an unknown `activations` or `rotation`.

    Example:
        >>> from nvfp4r.quantize import quantize
        >>> layer = NVFP4Linear(quantize(torch.ones(1, 32)))
        >>> layer(torch.full((2, 32), 0.5))
        tensor([[16.],
                [16.]])
        >>> layer.pack_(torch.bfloat16)
        >>> layer(torch.full((1, 32), 0.5, dtype=torch.bfloat16))
        tensor([[16.]], dtype=torch.bfloat16)
    """

    codes: Tensor
    block_scale: Tensor
    global_scale: Tensor
    tiles: Tensor
    alpha: Tensor
    input_scale: Tensor | None
    saturated_blocks: Tensor

    def __init__(
        self,
        weight: NVFP4Tensor,
        bias: Tensor | None = None,
        *,
        input_scale: Tensor | None = None,
        activations: Activations = "none",
        keep_dequantized: bool = True,
        name: str = "",
        rotation: Rotation | None = None,
    ) -> None:
        super().__init__()
        self.name = name or type(self).__name__
        if activations not in get_args(Activations):
            raise ValueError(
                f"{self.name}: activations is {activations!r}, need one of {get_args(Activations)}"
            )
        if activations == "nvfp4" and input_scale is None:
            raise ValueError(
                f"{self.name}: no input_scale, need one for activations='nvfp4'; calibrate the "
                "layer, or use activations='none'"
            )
        check_rotation(self.name, rotation)
        weight.validate(self.name)
        self.out_features, self.in_features = weight.shape
        self.activations = activations
        self.rotation = rotation
        self.keep_dequantized = keep_dequantized
        check_vectors(self.name, self.out_features, bias, input_scale)
        self.register_buffer("codes", weight.codes)
        self.register_buffer("block_scale", weight.block_scale)
        self.register_buffer("global_scale", weight.global_scale)
        self.register_buffer(
            "input_scale", None if input_scale is None else input_scale.to(weight.device)
        )
        self.register_buffer(
            "saturated_blocks",
            torch.zeros((), dtype=torch.int64, device=weight.device),
            persistent=False,
        )
        if rotation is not None:
            columns = torch.tensor(BLOCK, dtype=torch.uint8, device=weight.device)
            self.register_buffer("rotated_columns", columns)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.packed_dtype: torch.dtype | None = None
        self._matrix: Tensor | None = None  # the dequantised copy, derived from the buffers

    @property
    def weight(self) -> NVFP4Tensor:
        """The stored matrix, rotated or not; shares memory with the buffers.

        A packed layer unpacks it anew, bit for bit, and waits for the device.
        """
        if self.packed_dtype is not None:
            return unpack(self._packed_weight(self.packed_dtype))
        return NVFP4Tensor(self.codes, self.block_scale, self.global_scale)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] bfloat16, float16 or float32 -> [..., N] of the same dtype.

        Raises:
            TypeError: the layer is packed, and for another dtype than that of `x`.
            ValueError: the last dimension of `x` is not K.
        """
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"{self.name}: x has shape {list(x.shape)}, need [..., {self.in_features}]"
            )
        input_scale = self.input_scale if self.activations == "nvfp4" else None
        if self.packed_dtype is not None:
            return self._forward_packed(x, input_scale, self.packed_dtype)
        if input_scale is None:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            values = rotated(x, self.rotation).to(x.dtype)
            return F.linear(values, self._dequantized(x.dtype), bias)
        values, saturated = quantize_activations(rotated(x, self.rotation), input_scale)
        self.saturated_blocks += saturated
        # Operands have at most 6 significant bits, so TF32 would lose nothing either; but under
        # autocast the sum would be cut to 16 bits before its scale is applied, and overflow.
        with torch.autocast(x.device.type, enabled=False):
            y = F.linear(values, self._dequantized(torch.float32))
        y *= input_scale * self.global_scale  # [] or [N]
        if self.bias is not None:
            y += self.bias.float()
        return y.to(x.dtype)

    def pack_(self, dtype: torch.dtype) -> None:
        """Replaces the stored weight by its packed form, for activations of one dtype.

        The old buffers and the dequantised copy are dropped, so a CUDA graph that was captured
        before must not be replayed. Works on any device and waits for it. A state dict of a packed
        layer goes into layers packed alike; one that lost its `_metadata` is not checked for that.

        Args:
            dtype: torch.bfloat16 or torch.float16, that of every `x` from now on.

        Raises:
            TypeError: another dtype, or a layer that is packed already.
            ValueError: the weight has become unsound (`NVFP4Tensor.validate`).
        """
        if dtype not in ORDERS:
            raise TypeError(
                f"{self.name}: got {dtype} to pack for, need one of {list(ORDERS)}; a layer for "
                "other activations stays unpacked"
            )
        if self.packed_dtype is not None:
            raise TypeError(
                f"{self.name}: is packed for {self.packed_dtype} already, need one that is not; "
                "build a new layer from .weight to pack it for another dtype"
            )
        packed = pack(self.weight, ORDERS[dtype], name=self.name)
        del self.codes, self.block_scale, self.global_scale
        self.register_buffer("tiles", packed.tiles)
        self.register_buffer("alpha", packed.alpha)
        self.packed_dtype = dtype
        self._matrix = None

    def load_(
        self,
        weight: NVFP4Tensor,
        bias: Tensor | None = None,
        input_scale: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        """Replaces weight, bias and input scale in place and resets the saturation counter.

        What the layer holds has to come anew: nothing of the old layer survives. A packed layer
        stays packed. Checked before anything is written.

        Args:
            weight: of the same shape; validated here.
            bias: [N] if the layer has one, else None.
            input_scale: float32 [] if the layer has one, else None.
            rotation: that of the new weight, which has to be the layer's.

        Raises:
            TypeError: a wrong dtype.
            ValueError: an unsound weight, other shapes, another rotation, or a part missing or too
                many.
        """
        check_rotation(self.name, rotation)
        if rotation != self.rotation:
            raise ValueError(
                f"{self.name}: new weight has rotation {rotation!r}, but the layer computes with "
                f"{self.rotation!r}; pass rotation= if that is the new weight's too, or build a "
                "new layer"
            )
        weight.validate(self.name)
        if weight.shape != (self.out_features, self.in_features):
            raise ValueError(
                f"{self.name}: new weight has [N, K] {list(weight.shape)}, need "
                f"{[self.out_features, self.in_features]}"
            )
        if self.packed_dtype is None and weight.global_scale.ndim > self.global_scale.ndim:
            raise ValueError(
                f"{self.name}: new weight has one global_scale per row, this layer holds one for "
                "the matrix and is written in place; build a new layer instead"
            )
        check_same_part(self.name, "bias", self.bias, bias)
        check_same_part(self.name, "input_scale", self.input_scale, input_scale)
        check_vectors(self.name, self.out_features, bias, input_scale)
        with torch.no_grad():
            if self.packed_dtype is not None:
                target = self._packed_weight(self.packed_dtype)
                pack_(target, weight.to(target.device), name=self.name)
            else:
                self.codes.copy_(weight.codes)
                self.block_scale.copy_(weight.block_scale)
                self.global_scale.copy_(weight.global_scale)
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias)
            if self.input_scale is not None and input_scale is not None:
                self.input_scale.copy_(input_scale)
            self.saturated_blocks.zero_()
        self._refresh()

    def check_saturation(self) -> int:
        """How many activation blocks were clipped; warns with the layer's name if any was.

        Waits for the device.
        """
        count = int(self.saturated_blocks)
        if count:
            _log.warning(
                "%s: %d blocks of 16 activations exceeded the calibrated range and were clipped; "
                "calibrate on more text or with headroom",
                self.name,
                count,
            )
        return count

    def extra_repr(self) -> str:
        if self.packed_dtype is None:
            packed, kept = "", f", keep_dequantized={self.keep_dequantized}"
        else:
            packed, kept = f" packed for {self.packed_dtype}", ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, weight=NVFP4{packed}, "
            f"activations={self.activations}{kept}"
            + (f", rotation={self.rotation}" if self.rotation else "")
        )

    def _packed_weight(self, dtype: torch.dtype) -> PackedWeight:
        return PackedWeight(
            self.tiles, self.alpha, self.out_features, self.in_features, ORDERS[dtype]
        )

    def _forward_packed(self, x: Tensor, input_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        if x.dtype != dtype:
            raise TypeError(
                f"{self.name}: x has dtype {x.dtype}, need {dtype}, which the weight is packed "
                "for; convert x, or leave the layer unpacked"
            )
        alpha, rotation = self.alpha, self.rotation
        if input_scale is not None:
            # The op would quantise too, but not say how many blocks saturated.
            x, saturated = quantize_op(x, input_scale, rotation)
            self.saturated_blocks += saturated
            alpha, rotation = alpha * input_scale, None
        bias = None if self.bias is None else self.bias.to(dtype)
        sizes = self.out_features, self.in_features
        return linear_op(x, self.tiles, alpha, bias, None, *sizes, ORDERS[dtype], rotation)

    def _dequantized(self, dtype: torch.dtype) -> Tensor:
        """The matrix that `forward` multiplies with, [N, K]."""
        if self._matrix is not None and self._matrix.dtype == dtype:
            return self._matrix
        matrix = self._dequantize(dtype)
        self._matrix = matrix if self.keep_dequantized else None
        return matrix

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        weight = self.weight
        if self.activations == "nvfp4":  # the global scale is applied to the sums
            one = torch.ones((), dtype=torch.float32, device=weight.device)
            weight = NVFP4Tensor(weight.codes, weight.block_scale, one)
        # The copy outlives the call, so it must not be bound to the caller's inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return weight.dequantize(dtype)

    def _refresh(self) -> None:
        """Derives the dequantised copy anew, at its old address."""
        if self._matrix is None:
            return
        if self._matrix.device != self.codes.device:
            self._matrix = None
            return
        with torch.no_grad():
            self._matrix.copy_(self._dequantize(self._matrix.dtype))

    def _packing(self) -> str:
        """What the stored bytes do not tell, and state dicts carry as metadata."""
        turned = "" if self.rotation is None else f" and rotated by {self.rotation}"
        if self.packed_dtype is None:
            return f"not packed{turned}"
        return f"[{self.out_features}, {self.in_features}] packed for {self.packed_dtype}{turned}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            metadata.setdefault(prefix[:-1], {})[_PACKING] = self._packing()

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        got, own = local_metadata.get(_PACKING), self._packing()
        if got is not None and got != own:  # tiles in another order would fit, and read as garbage
            error_msgs.append(
                f"{self.name}: the state is that of a layer which is {got}, need one which is "
                f"{own}; pack_ makes a packed layer, rotation= a rotated one"
            )
            return
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        self._refresh()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NVFP4Linear:
        """Moves the buffers but never casts them: scales rounded to 16 bits would be wrong ones."""
        stored = {id(buffer) for buffer in self._buffers.values()}

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) in stored and moved.dtype != tensor.dtype:
                return tensor.to(moved.device)
            return moved

        self._matrix = None
        return super()._apply(move, recurse)
