"""Four over six: each block is scaled so that its largest weight becomes 6 or 4.

The codes for 4 and 6 leave a gap in which a scale to 6 errs most; scaled to 4, a block uses evenly
spaced codes at the top and gives up the 6. Whichever way has the smaller squared error is taken,
block by block. Source: Cook et al. 2025, "Four Over Six: More Accurate NVFP4 Quantization with
Adaptive Block Scaling" (arXiv:2512.02010). This module sees weights alone, no activations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4r.format import E2M1_MAX, NVFP4Tensor, e2m1_table
from nvfp4r.quantize import check_weight, global_scale_from_amax, quantize_rows
from nvfp4r.rounding import block_steps, blocks_of, magnitude_codes, nearest_scales, sign_bits

TOP_SCALE = 256.0
"""Block scale of the largest weight when scaled to 6; to 4 it is 384, which E4M3 has as well."""


def global_scale_four_over_six(amax: float | Tensor, name: str = "tensor") -> Tensor:
    """The global scale of this method: `amax / (6 * 256)`, reciprocal-exact.

    Arguments, result and errors are those of `global_scale_from_amax`.
    """
    return global_scale_from_amax(amax, name, top_scale=TOP_SCALE)


def quantize_four_over_six(
    weight: Tensor, *, global_scale: Tensor | None = None, name: str = "weight"
) -> NVFP4Tensor:
    """Rounds a weight matrix to NVFP4 with the better of two scales for every block.

    The scales are the E4M3 values nearest to amax / 6 and amax / 4 of the block (in units of
    `global_scale`). Codes are the nearest ones under either. The error is the sum of squared
    differences in float64, added in a fixed order, so that every device takes the same choice; if
    both are equal the scale to 6 is taken.

    Args:
        weight: [N, K] bfloat16, float16 or float32, K a multiple of 16, finite.
        global_scale: float32 [], the scale to use, for layers that share one; by default the
            `global_scale_four_over_six` of this matrix. A smaller one leaves large blocks no room
            for the scale to 4.
        name: what errors call the tensor.

    Returns:
        The quantised matrix on the device of `weight`.

    Raises:
        TypeError, ValueError: as `quantize`.
    """
    amax = check_weight(weight, global_scale, name)
    if global_scale is None:
        global_scale = global_scale_four_over_six(amax, name)
    return quantize_rows(weight, global_scale, _round_rows)


def _round_rows(rows: Tensor, global_scale: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    blocks = blocks_of(rows)
    magnitudes = blocks.double().abs_()  # [16, B]
    amax = magnitudes.amax(0)
    levels = e2m1_table(rows.device)[:8].double()
    candidates = []
    for top in (E2M1_MAX, 4.0):
        scale_bytes = nearest_scales(amax / (top * global_scale.double()), bounds)
        step = block_steps(scale_bytes, global_scale)
        codes = magnitude_codes(magnitudes, step)
        values = levels.index_select(0, codes.flatten().int()).view(codes.shape)
        squares = values.mul_(step).sub_(magnitudes).square_()
        candidates.append((codes, scale_bytes, _sum_of_16(squares)))
    (codes, scale_bytes, error), (codes_4, bytes_4, error_4) = candidates
    is_better = error_4 < error  # [B]
    codes = torch.where(is_better, codes_4, codes)
    return codes.add_(sign_bits(blocks)), torch.where(is_better, bytes_4, scale_bytes)


def _sum_of_16(values: Tensor) -> Tensor:
    """[16, B] -> [B], on every device in the same order: the lower half onto the upper half."""
    for half in (8, 4, 2, 1):
        values = values[:half] + values[half:]
    return values[0]
