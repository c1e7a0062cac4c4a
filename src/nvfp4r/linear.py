"""The NVFP4 linear layer as a torch module: 4-bit weights, activations as they are or emulated.

Without activation quantisation it computes what `torch.nn.Linear` computes with the dequantised
matrix, bit for bit. With it (W4A4) it emulates the tensor-core product: exact E2M1 x E4M3 values on
both sides, float32 accumulation, scales and bias in float32, one rounding to the output dtype.

This module knows nothing of models or files; hf.py places these layers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4r.dialects import Activations
from nvfp4r.format import NVFP4Tensor
from nvfp4r.quantize import quantize_activations

_log = logging.getLogger(__name__)


class NVFP4Linear(nn.Module):
    """`y = x @ W.T + bias` with W stored in NVFP4, for inference.

    Nothing in `forward` waits for an accelerator. Weights change through `load_` or
    `load_state_dict`; both also rewrite a dequantised copy in place, so captured graphs stay valid.
    Casting the module (`.to(torch.float16)`) casts the bias alone: the stored weight keeps its
    dtypes, and the matrix is dequantised to the dtype of `x`.

    Args:
        weight: N outputs, K inputs; validated here.
        bias: [N] floating point, or None.
        input_scale: float32 [], global scale of the activations; needed for activations="nvfp4".
        activations: "none" (W4A16) or "nvfp4" (W4A4, static `input_scale`).
        keep_dequantized: keep the matrix after first use, in the dtype of `x` ("none") or in
            float32 ("nvfp4"), for 2 or 4 bytes per weight; otherwise dequantise in every call.
        name: what logs and errors call the layer.

    Attributes:
        saturated_blocks: int64 [], blocks of 16 activations that were clipped so far.

    Raises:
        TypeError: `bias` or `input_scale` of a wrong dtype.
        ValueError: unsound weight, shapes that do not fit, an `input_scale` that is missing, zero,
            negative, NaN or infinite, or an unknown `activations`.

    Example:
        >>> from nvfp4r.quantize import quantize
        >>> layer = NVFP4Linear(quantize(torch.ones(1, 32)))
        >>> layer(torch.full((2, 32), 0.5))
        tensor([[16.],
                [16.]])
    """

    codes: Tensor
    block_scale: Tensor
    global_scale: Tensor
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
        weight.validate(self.name)
        self.out_features, self.in_features = weight.shape
        self.activations = activations
        self.keep_dequantized = keep_dequantized
        self._check_vectors(bias, input_scale)
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
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._matrix: Tensor | None = None  # the dequantised copy, derived from the buffers

    @property
    def weight(self) -> NVFP4Tensor:
        """The stored matrix; shares memory with the buffers."""
        return NVFP4Tensor(self.codes, self.block_scale, self.global_scale)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] bfloat16, float16 or float32 -> [..., N] of the same dtype.

        Raises:
            ValueError: the last dimension of `x` is not K.
        """
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"{self.name}: x has shape {list(x.shape)}, need [..., {self.in_features}]"
            )
        input_scale = self.input_scale if self.activations == "nvfp4" else None
        if input_scale is None:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.linear(x, self._dequantized(x.dtype), bias)
        values, saturated = quantize_activations(x, input_scale)
        self.saturated_blocks += saturated
        # Operands have at most 6 significant bits, so TF32 would lose nothing either; but under
        # autocast the sum would be cut to 16 bits before its scale is applied, and overflow.
        with torch.autocast(x.device.type, enabled=False):
            y = F.linear(values, self._dequantized(torch.float32))
        y *= input_scale * self.global_scale  # [] or [N]
        if self.bias is not None:
            y += self.bias.float()
        return y.to(x.dtype)

    def load_(
        self, weight: NVFP4Tensor, bias: Tensor | None = None, input_scale: Tensor | None = None
    ) -> None:
        """Replaces weight, bias and input scale in place and resets the saturation counter.

        What the layer holds has to come anew: nothing of the old layer survives. Checked before
        anything is written.

        Args:
            weight: of the same shape; validated here.
            bias: [N] if the layer has one, else None.
            input_scale: float32 [] if the layer has one, else None.

        Raises:
            TypeError: a wrong dtype.
            ValueError: an unsound weight, other shapes, or a part missing or too many.
        """
        weight.validate(self.name)
        if weight.shape != (self.out_features, self.in_features):
            raise ValueError(
                f"{self.name}: new weight has [N, K] {list(weight.shape)}, need "
                f"{[self.out_features, self.in_features]}"
            )
        if weight.global_scale.ndim > self.global_scale.ndim:
            raise ValueError(
                f"{self.name}: new weight has one global_scale per row, this layer holds one for "
                "the matrix and is written in place; build a new layer instead"
            )
        for field, old, new in (
            ("bias", self.bias, bias),
            ("input_scale", self.input_scale, input_scale),
        ):
            if (old is None) != (new is None):
                got, has = ("none", "one") if new is None else ("one", "none")
                raise ValueError(
                    f"{self.name}: got {got} as new {field}, but the layer has {has}; pass what "
                    "the layer holds, or build a new layer"
                )
        self._check_vectors(bias, input_scale)
        with torch.no_grad():
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
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, weight=NVFP4, activations={self.activations}, "
            f"keep_dequantized={self.keep_dequantized}"
        )

    def _check_vectors(self, bias: Tensor | None, input_scale: Tensor | None) -> None:
        if bias is not None:
            if not bias.is_floating_point():
                raise TypeError(f"{self.name}: bias has dtype {bias.dtype}, need floating point")
            if tuple(bias.shape) != (self.out_features,):
                raise ValueError(
                    f"{self.name}: bias has shape {list(bias.shape)}, need [{self.out_features}]"
                )
        if input_scale is not None:
            if input_scale.dtype != torch.float32:
                raise TypeError(
                    f"{self.name}: input_scale has dtype {input_scale.dtype}, need torch.float32"
                )
            if input_scale.ndim != 0:
                raise ValueError(
                    f"{self.name}: input_scale has shape {list(input_scale.shape)}, need []"
                )
            if not (math.isfinite(float(input_scale)) and float(input_scale) > 0):
                raise ValueError(
                    f"{self.name}: input_scale is {float(input_scale)}, need a finite multiplier "
                    "> 0; derive it with global_scale_from_amax"
                )

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

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
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
