"""`torch.ops.nvfp4r`: linear layers on packed NVFP4 weights, as custom ops with fake kernels.

    linear(x, tiles, alpha, bias, input_scale, N, K, order, rotation=None)
                                        any M: picks the path inside the op
    gemv(...)                           M <= 64 by the kernels, or an error
    gemm(...)                           any M by a dense product
    quantize(x, input_scale, rotation=None)
                                        activations to NVFP4 values

On a CPU the same ops compute the reference semantics, so that everything above them runs anywhere.
Importing this module registers the ops; kernels are compiled and loaded on first use of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4r.custom_op import custom_op
from nvfp4r.launches import (
    Layer,
    device_facts,
    plan_for,
    required_facts,
    run_plan,
    run_prologue,
    unpacked_rows,
)
from nvfp4r.methods.rotation import Rotation, rotate
from nvfp4r.packed import ORDERS, Order, PackedWeight, unpacked_chunks
from nvfp4r.plan import TILE_BYTES, TILE_COLUMNS, TILE_ROWS, DeviceFacts
from nvfp4r.plan.medium import MAX_MEDIUM_M
from nvfp4r.quantize import check_activations, quantize_activations


def rotated(x: Tensor, rotation: str | None) -> Tensor:
    """What a layer with rotated weights takes for x: float32 (or float64), not rounded any further.

    Without a rotation that is x itself.

    Raises:
        ValueError: an unknown rotation, or K no multiple of 16.
    """
    _check_rotation(rotation)
    return x if rotation is None else rotate(x)


def _check_rotation(rotation: str | None) -> None:
    if rotation is not None and rotation not in get_args(Rotation):
        raise ValueError(f"rotation is {rotation!r}, need one of {get_args(Rotation)} or None")


def _facts_of(x: Tensor) -> DeviceFacts | None:
    """Of x's GPU if the kernels are built for it."""
    return device_facts(x.device.index) if x.is_cuda else None


@custom_op("nvfp4r::quantize")
def quantize(x: Tensor, input_scale: Tensor, rotation: str | None = None) -> tuple[Tensor, Tensor]:
    """Activations [..., K] rounded to NVFP4: `e2m1 * e4m3`, without `input_scale`.

    The same bits as `nvfp4r.quantize.quantize_activations`, whose errors it raises; with a
    rotation, those of the rotated float32 values.

    Returns:
        values [..., K] in x's dtype, exact in all of them, and how many blocks of 16 saturated,
        int64 [].
    """
    check_activations(x, input_scale)
    _check_rotation(rotation)
    facts = _facts_of(x) if x.dtype in ORDERS and input_scale.device == x.device else None
    if facts is not None:
        saturated = torch.zeros((), dtype=torch.int64, device=x.device)
        values = run_prologue(x, input_scale, facts, rotation=rotation, saturated=saturated)
        return values, saturated
    values, saturated = quantize_activations(rotated(x, rotation), input_scale)
    return values.to(x.dtype), saturated


@quantize.register_fake
def _(x: Tensor, input_scale: Tensor, rotation: str | None = None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((), dtype=torch.int64)


@custom_op("nvfp4r::linear")
def linear(
    x: Tensor,
    tiles: Tensor,
    alpha: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    N: int,
    K: int,
    order: str,
    rotation: str | None = None,
) -> Tensor:
    """y = alpha * (x w^T) + bias on a packed weight; the path depends on M, inside the op.

    Args:
        x: [..., K] in the dtype of `order`.
        tiles, alpha, N, K, order: of a `PackedWeight`.
        bias: [N] in x's dtype, or None.
        input_scale: float32 []; given, x is quantised to NVFP4 first (W4A4).
        rotation: "hadamard16" for a weight that was rotated: x is rotated in float32, then rounded
            once, to NVFP4 or to its dtype.

    Returns:
        [..., N] in x's dtype: float32 sums, alpha and bias in float32, one rounding at the end.
    """
    return multiply(x, Layer(tiles, alpha, bias, input_scale, N, K, order, rotation))[0]


def multiply(x: Tensor, layer: Layer) -> tuple[Tensor, str]:
    """What `linear` computes, for other ops: an op within an op costs as much again.

    Returns:
        y [..., N], and the path of its plan; "reference" where there are no kernels.
    """
    _check(x, layer)
    rows = x if x.ndim == 2 else x.reshape(-1, layer.K)
    M, facts = rows.shape[0], _facts_of(x)
    plan = None
    if facts is not None and M:
        sizes = (M, layer.N, layer.K, layer.order)
        plan = plan_for(*sizes, facts, x.device.index, layer.prepares)
    if plan is None or plan.path == "unpack":
        y = _dense(rows, layer)
    else:
        y = run_plan(plan, rows, layer)
    if x.ndim != 2:
        y = y.reshape(*x.shape[:-1], layer.N)
    return y, "reference" if plan is None else plan.path


@custom_op("nvfp4r::gemv")
def gemv(
    x: Tensor,
    tiles: Tensor,
    alpha: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    N: int,
    K: int,
    order: str,
    rotation: str | None = None,
) -> Tensor:
    """As `linear` for 1 .. 64 tokens, but on a GPU never by another path than a kernel.

    Raises:
        ValueError: no token, or more than 64.
        UnsupportedGPUError: the kernels are not built for this GPU.
    """
    layer = Layer(tiles, alpha, bias, input_scale, N, K, order, rotation)
    _check(x, layer)
    rows = x.reshape(-1, K)
    M = rows.shape[0]
    if not 1 <= M <= MAX_MEDIUM_M:
        raise ValueError(f"gemv: {M} tokens; 1 to {MAX_MEDIUM_M} are needed, linear takes any")
    if not x.is_cuda:
        y = _dense(rows, layer)
    else:
        index = x.device.index
        plan = plan_for(M, N, K, order, required_facts(index), index, layer.prepares)
        y = run_plan(plan, rows, layer)
    return y.reshape(*x.shape[:-1], N)


@custom_op("nvfp4r::gemm")
def gemm(
    x: Tensor,
    tiles: Tensor,
    alpha: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    N: int,
    K: int,
    order: str,
    rotation: str | None = None,
) -> Tensor:
    """As `linear`, by a dense product on unpacked rows whatever the number of tokens."""
    layer = Layer(tiles, alpha, bias, input_scale, N, K, order, rotation)
    _check(x, layer)
    return _dense(x.reshape(-1, K), layer).reshape(*x.shape[:-1], N)


@linear.register_fake
@gemv.register_fake
@gemm.register_fake
def _(
    x: Tensor,
    tiles: Tensor,
    alpha: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    N: int,
    K: int,
    order: str,
    rotation: str | None = None,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], N))


def _check(x: Tensor, layer: Layer) -> None:
    """Everything that a kernel would otherwise read out of bounds or misread."""
    if ORDERS.get(x.dtype) != layer.order:
        orders = tuple(ORDERS.values())
        if layer.order not in orders:
            raise ValueError(f"order is {layer.order!r}; it must be {' or '.join(orders)}")
        raise TypeError(
            f"x has dtype {x.dtype}, but the weight is packed in order {layer.order!r}; "
            "convert x, or pack the weight in the other order"
        )
    _check_rotation(layer.rotation)
    N, K = layer.N, layer.K
    if x.ndim == 0 or x.shape[-1] != K:
        raise ValueError(f"x has shape {list(x.shape)}; [..., {K}] is needed")
    tiles = (-(-N // TILE_ROWS), -(-K // TILE_COLUMNS), TILE_BYTES)
    device = x.device
    _check_part("tiles", layer.tiles, tiles, torch.uint8, device)
    _check_part("alpha", layer.alpha, (N,), torch.float32, device)
    if layer.bias is not None:
        _check_part("bias", layer.bias, (N,), x.dtype, device)
    if layer.input_scale is not None:
        _check_part("input_scale", layer.input_scale, (), torch.float32, device)
    if layer.tiles.data_ptr() % 16:
        raise ValueError("tiles does not start at a multiple of 16 bytes; clone it once")


def _check_part(
    name: str, tensor: Tensor, size: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if tensor.shape != size or tensor.dtype != dtype:
        raise ValueError(
            f"{name} is {list(tensor.shape)} {tensor.dtype}; {list(size)} {dtype} is needed"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, x on {device}; move one of them")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous; call .contiguous() once, when loading")


def _prepared(x: Tensor, layer: Layer) -> Tensor:
    """x rotated and rounded as the layer wants it, in x's dtype, without the input scale."""
    if layer.input_scale is not None:
        return quantize(x, layer.input_scale, layer.rotation)[0]
    if layer.rotation is None:
        return x
    facts = _facts_of(x)
    if facts is not None:
        return run_prologue(x, None, facts, rotation=layer.rotation)
    return rotated(x, layer.rotation).to(x.dtype)


def _dense(x: Tensor, layer: Layer) -> Tensor:
    """Any M on any device: unpack some rows to the exact `e2m1 * e4m3`, multiply, then alpha."""
    alpha = layer.alpha if layer.input_scale is None else layer.alpha * layer.input_scale
    x = _prepared(x, layer)
    y = torch.empty((x.shape[0], layer.N), dtype=x.dtype, device=x.device)
    for weight, rows in _unpacked(layer, x):
        product = _float32_product(x, weight).mul_(alpha[rows])
        if layer.bias is not None:
            product += layer.bias[rows]
        y[:, rows] = product  # rounds
    return y


def _unpacked(layer: Layer, x: Tensor) -> Iterator[tuple[Tensor, slice]]:
    facts = _facts_of(x)
    if facts is not None:
        yield from unpacked_rows(layer, x.shape[0], facts)
        return
    order = cast(Order, layer.order)  # _check has refused anything else
    packed = PackedWeight(layer.tiles, layer.alpha, layer.N, layer.K, order)
    for part, rows in unpacked_chunks(packed):
        yield part.dequantize(x.dtype), rows


def _float32_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T of 16-bit operands in float32, so that alpha comes before the rounding."""
    with torch.autocast(x.device.type, enabled=False):
        if x.is_cuda:
            return torch.mm(x, weight.T, out_dtype=torch.float32)
        return F.linear(x.float(), weight.float())
