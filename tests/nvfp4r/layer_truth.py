"""Random layers as the ops take them, and their products in float64 on the device they are on.

The truth takes weights from `dequantize` and activations from `rotate` and `quantize_activations`,
which are compared with nvfp4r.reference bit by bit elsewhere; what it checks is the product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4r.format import NVFP4Tensor
from nvfp4r.launches import Layer
from nvfp4r.methods.rotation import rotate
from nvfp4r.packed import ORDERS, pack
from nvfp4r.quantize import quantize_activations
from nvfp4r.tuning.matrix import Truth

MODES = {  # whether x is quantised, and its rotation
    "W4A16": (False, None),
    "W4A4": (True, None),
    "rotated": (False, "hadamard16"),
    "rotated W4A4": (True, "hadamard16"),
}


def random_layer(
    N: int, K: int, dtype: torch.dtype, mode: str = "W4A16", *, device: str = "cuda"
) -> tuple[NVFP4Tensor, Layer]:
    """A matrix of every code, a global scale for each row, a bias; and the same as the ops take it.

    Block scales are from 2**-2 to 2**3, as large sums in float16 would be infinite else.
    """
    generator = torch.Generator().manual_seed(N + K)
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(40, 81, (N, K // 16), dtype=torch.uint8, generator=generator)
    alpha = torch.rand(N, generator=generator) * 1e-2 + 1e-3
    bias = torch.randn(N, generator=generator).to(dtype).to(device)
    weight = NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), alpha).to(device)
    packed = pack(weight, ORDERS[dtype])
    quantised, rotation = MODES[mode]
    scale = torch.tensor(8 / 2688, device=device) if quantised else None
    return weight, Layer(packed.tiles, packed.alpha, bias, scale, N, K, ORDERS[dtype], rotation)


def random_x(M: int, K: int, dtype: torch.dtype, *, device: str = "cuda") -> Tensor:
    """[M, K] normal numbers, some rows much smaller, some zero."""
    generator = torch.Generator().manual_seed(M + K)
    x = torch.randn(M, K, generator=generator)
    x[1::5] *= 1e-3
    x[2::7] = 0
    return x.to(dtype).to(device)


def layer_truth(x: Tensor, weight: NVFP4Tensor, layer: Layer) -> Truth:
    """x through the layer, and how far off each element of a kernel's result may be.

    The limit: a float32 sum of K exact products is off by K 2**-23 of the sum of their magnitudes
    at most; scales and bias cost 2**-24 each, four times at most; the last cast half a unit in its
    last place, or half the smallest number. 1.01 covers the terms of second order.

    K 2**-23 holds for any order of additions that round or cut off to float32. For the instructions
    of tensor cores, `mma.sync` and `wgmma` alike, NVIDIA says no more than that they accumulate in
    float32. Assumed here, in the manner of what others measured on tensor cores (Khattak and
    Mikaitis, arXiv:2512.07004, of which only the abstract was read), and tried by the GPU tests:
    the products of a step and the sum so far are aligned with the largest of them, cut off below,
    added, and cut to float32. With 16 products and one bit or more kept below float32's last, that
    costs 17 2**-24 of the largest term and 2**-23 of the sum, in K / 16 steps 1.19 K 2**-24: less.
    """
    values: Tensor = x
    if layer.rotation is not None:
        values = rotate(x)
    scale = torch.ones((), device=x.device)  # as a global scale it makes dequantising exact
    matrix = NVFP4Tensor(weight.codes, weight.block_scale, scale).dequantize(torch.float32).double()
    if layer.input_scale is not None:
        values, scale = quantize_activations(values, layer.input_scale)[0], layer.input_scale
    else:
        values = values.to(x.dtype)
    factor = weight.global_scale.double() * scale.double()
    y = values.double() @ matrix.T * factor
    magnitude = values.double().abs() @ matrix.abs().T * factor
    if layer.bias is not None:
        y += layer.bias.double()
        magnitude += layer.bias.double().abs()
    rounding = torch.finfo(x.dtype)
    sums = (layer.K * 2**-23 + 4 * 2**-24) * magnitude
    smallest = rounding.smallest_normal * rounding.eps
    return Truth(y, 1.01 * (sums + rounding.eps / 2 * y.abs()) + smallest / 2)
