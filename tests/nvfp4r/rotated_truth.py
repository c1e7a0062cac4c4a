"""Rotated layers in float64, by a matrix of their own, and inputs that float32 rotates exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4r import reference
from nvfp4r.format import NVFP4Tensor

HADAMARD = torch.tensor(
    [[(-1) ** (i & j).bit_count() / 4 for j in range(16)] for i in range(16)], dtype=torch.float64
)


def turn(x: Tensor) -> Tensor:
    """Every block of 16 of [..., K] times the matrix, in float64."""
    return (x.detach().cpu().double().unflatten(-1, (-1, 16)) @ HADAMARD).flatten(-2)


def grid(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Multiples of 2**-5 below 4: at most 7 bits, and 11 for sums of 16, so that float32 is exact.

    The rotated values are multiples of 2**-7 below 16; bfloat16 cannot hold them all.
    """
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-127, 128, shape, generator=generator) / 32).to(dtype)


def rotated_values(x: Tensor, input_scale: Tensor | None) -> tuple[Tensor, int]:
    """What the weights are multiplied with, in float64, and how many blocks saturated.

    Args:
        x: of `grid`, whose rotation is exact in float32.
        input_scale: None for W4A16, where the rotated values are rounded to x's dtype once.
    """
    turned = turn(x)
    assert torch.equal(turned, turned.float().double())
    if input_scale is None:
        return turned.float().to(x.dtype).double(), 0
    values, saturated = reference.quantize_activations(turned, input_scale)
    return values * float(input_scale), saturated


def assert_rotated(
    y: Tensor,
    x: Tensor,
    weight: NVFP4Tensor,
    bias: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> None:
    """Every element of y within the error that its own sum allows; for exact weights.

    With p_k the K products and u = 2**-24, float32 sums in any order cost K u sum|p|; scales and
    bias cost u each of what they touch, and the cast half a unit in the last place of y's dtype.
    1.01 covers the terms of second order.
    """
    values, _ = rotated_values(x, input_scale)
    rows = reference.dequantize(weight)
    exact, magnitude = values @ rows.T, values.abs() @ rows.abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    half_unit = torch.finfo(y.dtype).eps / 2 * exact.abs()
    tiny = 2.0**-25 if y.dtype == torch.float16 else 2.0**-134
    bound = 1.01 * ((x.shape[-1] + 4) * 2.0**-24 * magnitude + half_unit) + tiny
    error = (y.detach().cpu().double() - exact).abs()
    assert (y.dtype, y.shape) == (x.dtype, exact.shape)
    assert bool((error <= bound).all()), f"{float((error / bound).max()):.2f} times the bound"
