"""GPTQ at NVFP4: rounds a matrix column by column so that its layer's outputs change least.

Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers". The squared error of a layer's outputs over calibration inputs x is
trace(E H E^T), with E = W - Q and the Hessian H = sum of x^T x. Columns are rounded from first to
last; each rounding error is made up for, as far as possible, by the columns that are still free.

The usual form updates the free columns with rows of the inverse of H. Here H = R R^T with R upper
triangular is enough: column j of E R is sum_{i<=j} E_i R_ij, so the best value for column j, once
those before it are rounded, is W_j + (sum_{i<j} E_i R_ij) / R_jj. The codes are the same, nothing
is inverted, and E can be kept in the place of the columns that are done.

This module knows matrices: which layers share inputs, and where those come from, is the business of
whoever runs the model (hf/sequential.py).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4r.format import BLOCK, E2M1_MAX, E2M1_VALUES, NVFP4Tensor
from nvfp4r.quantize import check_weight, quantize
from nvfp4r.rounding import block_steps, e4m3_bounds, nearest_scales, sign_bits
from nvfp4r.threads import one_thread_per_operation

_log = logging.getLogger(__name__)

METHODS = ("gptq", "mr-gptq")
"""The methods that are made of this; the second one in the rotated basis."""

DAMPING = 0.01
"""Added to the diagonal of the Hessian by default, as a share of the diagonal's mean."""

_GROUP = 128  # columns that get the errors of all before them by one product
_MOST_DAMPING = (
    1.0  # beyond it the Hessian says little and the matrix is all but rounded to nearest
)


class HessianSum:
    """Sum of x^T x over the inputs of one layer, or of layers that share their inputs.

    Args:
        inputs: K, the width of the inputs.
        name: what errors call the layer.
        dtype: float32 or float64, of the sum and of all that is computed from it.
        device: where the sum lies; inputs are moved there.

    Attributes:
        matrix: [K, K].
        tokens: rows added so far.
    """

    def __init__(
        self,
        inputs: int,
        *,
        name: str,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.name = name
        self.matrix = torch.zeros((inputs, inputs), dtype=dtype, device=device)
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """Adds inputs [..., K] of any floating dtype; waits for the device.

        Raises:
            ValueError: another K, or values that are NaN or infinite; names the layer.
        """
        K = self.matrix.shape[0]
        if x.ndim == 0 or x.shape[-1] != K:
            raise ValueError(f"{self.name}: got inputs {list(x.shape)}, need [..., {K}]")
        rows = x.detach().reshape(-1, K).to(self.matrix)
        finite = torch.isfinite(rows)
        if not bool(finite.all()):
            raise ValueError(
                f"{self.name}: {int((~finite).sum())} of {rows.numel()} calibration inputs are NaN "
                "or infinite, need finite ones; check that the checkpoint is intact, and run the "
                "model in float32 or bfloat16 if it overflows in float16"
            )
        self.matrix.addmm_(rows.t(), rows)
        self.tokens += rows.shape[0]


@dataclass(frozen=True, eq=False)
class HessianFactor:
    """A damped Hessian, factorised.

    Attributes:
        upper: [K, K] upper triangular R, H + damping = R R^T up to a common factor; None if every
            input was zero, or there was none: then no error matters, and rounding to nearest is
            all that can be done.
        tokens: rows the Hessian was summed over.
        damping: what was added to the diagonal, as a share of its mean.
        is_singular: inputs were combinations of each other, so that without damping there is no
            best value.
        dead_inputs: how many inputs were always zero; their weights are rounded to nearest.
    """

    upper: Tensor | None
    tokens: int
    damping: float
    is_singular: bool
    dead_inputs: int


def factorise(hessian: HessianSum, damping: float = DAMPING) -> HessianFactor:
    """Damps a Hessian and factorises it.

    The log says, with the layer's name, if the sum was singular to within rounding, so that damping
    alone made the result unique, and if there was no factor even when damped: damping then grows
    tenfold until there is one. It is a warning, or an info if there are fewer tokens than inputs,
    which cannot but be singular. The sum itself is left as it is; the factor takes
    as much memory, and making it three times that.

    Args:
        hessian: the sum over all calibration inputs.
        damping: share of the diagonal's mean, within (0, 1].

    Raises:
        ValueError: `damping` out of range; sums beyond the range of the dtype; no factor at the
            largest damping. Names the layer.
    """
    if not 0 < damping <= _MOST_DAMPING:
        raise ValueError(f"damping is {damping}, need a share within (0, {_MOST_DAMPING:g}]")
    name, tokens = hessian.name, hessian.tokens
    diagonal = hessian.matrix.diagonal()
    total = float(diagonal.double().sum())
    if not math.isfinite(total):
        raise ValueError(
            f"{name}: its calibration inputs are too large, their squares exceed "
            f"{hessian.matrix.dtype}; check that the checkpoint is intact"
        )
    K, dead = len(diagonal), int((diagonal == 0).sum())
    if dead == K:
        reason = "saw no token" if tokens == 0 else "had inputs of zero only"
        _log.warning("%s: %s in calibration; it is rounded to nearest", name, reason)
        return HessianFactor(None, tokens, damping, True, dead)
    # Upside down, as torch factorises into lower triangles.  [K, K], mean diagonal 1
    flipped = (hessian.matrix / (total / (K - dead))).flip(0, 1)
    flipped.diagonal().masked_fill_(flipped.diagonal() == 0, 1.0)
    is_singular = _is_singular(flipped)
    lower, used = _damped_factor(flipped, damping, name)
    del flipped
    if is_singular or used != damping:
        # Too few tokens are the same news for layer after layer, which callers may give once.
        level = logging.INFO if tokens < K and used == damping else logging.WARNING
        _log.log(
            level,
            "%s: the Hessian of its %d inputs is singular to within rounding over %d tokens (%d "
            "inputs were always zero); damped by %g of its mean diagonal",
            *(name, K, tokens, dead, used),
        )
    return HessianFactor(lower.flip(0, 1), tokens, used, is_singular, dead)


def _is_singular(matrix: Tensor) -> bool:
    """Whether, to within rounding, an input is a combination of others.

    The square of a pivot is what is left of a diagonal entry once the other inputs explained what
    they can.
    """
    lower, failed = torch.linalg.cholesky_ex(matrix)
    left = lower.diagonal().square() / matrix.diagonal()
    return bool(failed) or float(left.amin()) <= len(left) * torch.finfo(matrix.dtype).eps


def _damped_factor(matrix: Tensor, damping: float, name: str) -> tuple[Tensor, float]:
    """The lower factor of `matrix`, which is changed, and how much damping it took."""
    diagonal = matrix.diagonal().clone()
    while damping <= _MOST_DAMPING:
        matrix.diagonal().copy_(diagonal + damping)
        lower, failed = torch.linalg.cholesky_ex(matrix)
        if not bool(failed):
            return lower, damping
        del lower  # as large as the matrix
        damping *= 10
    raise ValueError(
        f"{name}: the Hessian of its inputs has no factor, even when damped by {damping / 10:g} of "
        "its mean diagonal; use more or other calibration texts, or exclude the layer"
    )


def quantize_gptq(
    weight: Tensor,
    factor: HessianFactor,
    *,
    global_scale: Tensor,
    name: str = "weight",
) -> NVFP4Tensor:
    """Rounds a weight matrix so that the outputs of its layer change least, column by column.

    The scale of a block is chosen when its first column is reached: that of `quantize` for its
    weights as they should be by then, had no further rounding to be done. Rows do not see each
    other, so layers that share inputs and global scale may be stacked.

    Args:
        weight: [N, K] bfloat16, float16 or float32, K a multiple of 16, finite.
        factor: the Hessian of the layer's inputs, K wide, on the device of `weight`.
        global_scale: float32 [], from the largest weight before any was moved. Weights moved beyond
            it saturate, and the columns after them make up for that too.
        name: what errors call the tensor.

    Returns:
        The quantised matrix, on the device of `weight`; exactly that of `quantize` if the Hessian
        is diagonal.

    Raises:
        TypeError, ValueError: as `quantize`; a factor of another width.
    """
    check_weight(weight, global_scale, name)
    if factor.upper is None:
        return quantize(weight, global_scale=global_scale, name=name)
    upper, K = factor.upper, weight.shape[1]
    if upper.shape[0] != K:
        raise ValueError(f"{name}: got a Hessian of {upper.shape[0]} inputs, need K={K}")
    scale = global_scale.to(weight.device)
    # Column by column along memory; errors W - Q above, weights below.  [K, N]
    state = torch.empty((K, len(weight)), dtype=upper.dtype, device=weight.device)
    state.copy_(weight.detach().t())
    codes = torch.empty(state.shape, dtype=torch.uint8, device=weight.device)
    scale_bytes = torch.empty((K // BLOCK, len(weight)), dtype=torch.uint8, device=weight.device)
    rounder = _BlockRounder(scale)
    for start in range(0, K, _GROUP):
        stop = min(start + _GROUP, K)
        # What the errors so far do to the columns of this group: sum_i E_i R_ij.  [group, N]
        pulls = upper[:start, start:stop].t() @ state[:start]
        with one_thread_per_operation():  # small ones: many for each column
            for block in range(start, stop, BLOCK):
                own = slice(block, block + BLOCK)
                pull = pulls[block - start : block - start + BLOCK]
                pull = pull + upper[start:block, own].t() @ state[start:block]
                codes[own], scale_bytes[block // BLOCK] = rounder.round(
                    state[own], pull, upper[own, own]
                )
    packed = codes[0::2] | (codes[1::2] << 4)  # [K/2, N]
    return NVFP4Tensor(
        packed.t().contiguous(), scale_bytes.t().contiguous().view(torch.float8_e4m3fn), scale
    )


class _BlockRounder:
    """Rounds one block of columns after the other under one global scale."""

    def __init__(self, global_scale: Tensor) -> None:
        device = global_scale.device
        self._global_scale = global_scale
        self._bounds = e4m3_bounds(device)
        self._values = torch.tensor(E2M1_VALUES, dtype=torch.float64, device=device)
        midpoints = (self._values[:-1] + self._values[1:]) / 2
        self._midpoints = midpoints.unsqueeze(-1)  # [7, 1]

    def round(self, weights: Tensor, pull: Tensor, corner: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scale bytes of a block; its rounding errors replace `weights`.

        Args:
            weights: [16, N], changed.
            pull: [16, N], what errors before the block do to its columns; changed.
            corner: [16, 16], the block's own part of the upper factor.

        Returns:
            codes [16, N] and scale bytes [N], uint8.
        """
        # The columns as they should be if none of the block were rounded.
        wanted = weights + torch.linalg.solve_triangular(corner.t(), pull, upper=False)
        amax = wanted.abs().amax(0).double()
        scale_bytes = nearest_scales(amax / (E2M1_MAX * self._global_scale.double()), self._bounds)
        step = block_steps(scale_bytes, self._global_scale)  # [N]
        bounds = self._code_bounds(step)
        codes = torch.empty(weights.shape, dtype=torch.uint8, device=weights.device)
        for j in range(BLOCK):
            target = weights[j] + pull[j] / corner[j, j]
            magnitude = (target.abs() >= bounds).sum(0)
            codes[j] = magnitude.to(torch.uint8) | sign_bits(target)
            rounded = (self._values[magnitude] * step).to(weights.dtype).copysign(target)
            weights[j] -= rounded
            pull[j + 1 :] += corner[j, j + 1 :, None] * weights[j]
        return codes, scale_bytes

    def _code_bounds(self, step: Tensor) -> Tensor:
        """[7, N] float64: the smallest magnitudes that get codes 1..7; ties go to even codes."""
        bounds = step * self._midpoints
        bounds[0::2] = bounds[0::2].nextafter(bounds.new_full((), math.inf))
        return bounds
