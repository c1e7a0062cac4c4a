"""`torch.ops.nvfp4r`: linear layers on packed NVFP4 weights, as custom ops with fake kernels.

    linear(x, tiles, alpha, bias, input_scale, N, K, order)  any M: picks the path inside the op
    gemv(...)                                                M <= 16 by the kernel, or an error
    quantize(x, input_scale)                                 activations to NVFP4 values

On a CPU the same ops compute the reference semantics, so that everything above them runs anywhere.
Importing this module registers the ops; kernels are compiled and loaded on first use of a GPU.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4r.jit import UnsupportedGPUError, load_module, target_for
from nvfp4r.packed import ORDERS, Order, PackedWeight, unpacked_chunks
from nvfp4r.plan import (
    MAX_SMALL_M,
    TILE_BYTES,
    TILE_COLUMNS,
    TILE_ROWS,
    DeviceFacts,
    Plan,
    choose_plan,
)
from nvfp4r.quantize import quantize_activations

# struct LinearArgs of kernels/linear_small.cuh: six pointers, six ints.
_ARGUMENT = struct.Struct("@6P6i")


class Layer(NamedTuple):
    """What the ops take beside x, as a schema can carry it: a `PackedWeight` and its companions.

    Attributes:
        tiles, alpha, N, K, order: of a `PackedWeight`.
        bias: [N] in x's dtype, or None.
        input_scale: float32 []; given, x is quantised to NVFP4 first (W4A4).
    """

    tiles: Tensor
    alpha: Tensor
    bias: Tensor | None
    input_scale: Tensor | None
    N: int
    K: int
    order: str


@torch.library.custom_op("nvfp4r::quantize", mutates_args=())
def quantize(x: Tensor, input_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Activations [..., K] to `e2m1 * e4m3`, float32 (exact in fp16), without `input_scale`.

    Returns:
        values [..., K] float32, and how many blocks of 16 saturated, int64 [].
    """
    return quantize_activations(x, input_scale)


@quantize.register_fake
def _(x: Tensor, input_scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.float32), x.new_empty((), dtype=torch.int64)


@torch.library.custom_op("nvfp4r::linear", mutates_args=())
def linear(
    x: Tensor,
    tiles: Tensor,
    alpha: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    N: int,
    K: int,
    order: str,
) -> Tensor:
    """y = alpha * (x w^T) + bias on a packed weight; the path depends on M, inside the op.

    Args:
        x: [..., K] in the dtype of `order`.
        tiles, alpha, N, K, order: of a `PackedWeight`.
        bias: [N] in x's dtype, or None.
        input_scale: float32 []; given, x is quantised to NVFP4 first (W4A4).

    Returns:
        [..., N] in x's dtype: float32 sums, alpha and bias in float32, one rounding at the end.
    """
    layer = Layer(tiles, alpha, bias, input_scale, N, K, order)
    _check(x, layer)
    rows = x.reshape(-1, K)
    plan = None
    if x.is_cuda and rows.shape[0]:
        facts = device_facts(x.device.index)
        plan = choose_plan(rows.shape[0], N, K, order, facts) if facts else None
    if plan is None or plan.path != "small":
        y = _dense(rows, layer)
    else:
        y = run_plan(plan, rows, layer)
    return y.reshape(*x.shape[:-1], N)


@torch.library.custom_op("nvfp4r::gemv", mutates_args=())
def gemv(
    x: Tensor,
    tiles: Tensor,
    alpha: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    N: int,
    K: int,
    order: str,
) -> Tensor:
    """As `linear` for 1 .. 16 tokens, but never by another path than the kernel on a GPU.

    Raises:
        ValueError: more than 16 tokens.
        UnsupportedGPUError: the kernels are not built for this GPU.
    """
    layer = Layer(tiles, alpha, bias, input_scale, N, K, order)
    _check(x, layer)
    rows = x.reshape(-1, K)
    M = rows.shape[0]
    if not 1 <= M <= MAX_SMALL_M:
        raise ValueError(f"gemv: {M} tokens; 1 to {MAX_SMALL_M} are needed, linear takes any")
    if not x.is_cuda:
        y = _dense(rows, layer)
    else:
        plan = choose_plan(M, N, K, order, _facts(x.device.index))
        y = run_plan(plan, rows, layer)
    return y.reshape(*x.shape[:-1], N)


@linear.register_fake
@gemv.register_fake
def _(
    x: Tensor,
    tiles: Tensor,
    alpha: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    N: int,
    K: int,
    order: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], N))


def _check(x: Tensor, layer: Layer) -> None:
    """Everything that a kernel would otherwise read out of bounds or misread."""
    orders = tuple(ORDERS.values())
    if layer.order not in orders:
        raise ValueError(f"order is {layer.order!r}; it must be {' or '.join(orders)}")
    if ORDERS.get(x.dtype) != layer.order:
        raise TypeError(
            f"x has dtype {x.dtype}, but the weight is packed in order {layer.order!r}; "
            "convert x, or pack the weight in the other order"
        )
    N, K = layer.N, layer.K
    if x.ndim == 0 or x.shape[-1] != K:
        raise ValueError(f"x has shape {list(x.shape)}; [..., {K}] is needed")
    shape = (-(-N // TILE_ROWS), -(-K // TILE_COLUMNS), TILE_BYTES)
    wanted: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype]] = [
        ("tiles", layer.tiles, shape, torch.uint8),
        ("alpha", layer.alpha, (N,), torch.float32),
        ("bias", layer.bias, (N,), x.dtype),
        ("input_scale", layer.input_scale, (), torch.float32),
    ]
    for name, tensor, size, dtype in wanted:
        if tensor is None:
            continue
        if tuple(tensor.shape) != size or tensor.dtype != dtype:
            raise ValueError(
                f"{name} is {list(tensor.shape)} {tensor.dtype}; {list(size)} {dtype} is needed"
            )
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {x.device}; move one of them")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous; call .contiguous() once, when loading")
    if layer.tiles.data_ptr() % 16:
        raise ValueError("tiles does not start at a multiple of 16 bytes; clone it once")


def device_facts(index: int) -> DeviceFacts | None:
    """Of a GPU that the kernels are built for, else None."""
    try:
        return _facts(index)
    except UnsupportedGPUError:
        return None


@cache
def _facts(index: int) -> DeviceFacts:
    target = target_for(torch.cuda.get_device_capability(index))
    return DeviceFacts(
        sm_count=torch.cuda.get_device_properties(index).multi_processor_count,
        shared_bytes_per_block=target.shared_bytes_per_block,
        has_pdl=target.has_pdl,
    )


def run_plan(plan: Plan, x: Tensor, layer: Layer) -> Tensor:
    """Launch the kernel of a plan; the arguments are those of `linear` and are not checked.

    For the ops, and for measurements that compare plans.

    Args:
        x: [M, K]; the plan was made for this M.
    """
    if layer.input_scale is not None:
        values, _ = quantize_activations(x, layer.input_scale)
        x = values.to(x.dtype)  # exact: at most 6 significant bits
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()  # 16-byte loads; torch allocates aligned
    M, N, K = x.shape[0], layer.N, layer.K
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    argument = _ARGUMENT.pack(
        layer.tiles.data_ptr(),
        x.data_ptr(),
        y.data_ptr(),
        layer.alpha.data_ptr(),
        0 if layer.bias is None else layer.bias.data_ptr(),
        0 if layer.input_scale is None else layer.input_scale.data_ptr(),
        *(M, N, K, layer.tiles.shape[0], layer.tiles.shape[1], plan.depth),
    )
    with torch.cuda.device(x.device):
        load_module(x.device.index).kernel(plan.kernel).launch(
            argument,
            grid=(plan.grid, 1, 1),
            block=plan.threads,
            shared_bytes=plan.shared_bytes,
            pdl=plan.pdl,
            stream=torch.cuda.current_stream().cuda_stream,
        )
    return y


def _dense(x: Tensor, layer: Layer) -> Tensor:
    """Any M on any device: unpack some rows to the exact `e2m1 * e4m3`, multiply, then alpha."""
    alpha, order = layer.alpha, cast(Order, layer.order)  # _check has refused anything else
    if layer.input_scale is not None:
        x = quantize_activations(x, layer.input_scale)[0].to(x.dtype)  # exact: 6 significant bits
        alpha = alpha * layer.input_scale
    y = torch.empty((x.shape[0], layer.N), dtype=x.dtype, device=x.device)
    weight = PackedWeight(layer.tiles, alpha, layer.N, layer.K, order)
    for part, rows in unpacked_chunks(weight):
        product = _float32_product(x, part.dequantize(x.dtype)) * alpha[rows]
        if layer.bias is not None:
            product += layer.bias[rows].float()
        y[:, rows] = product.to(x.dtype)
    return y


def _float32_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T of 16-bit operands in float32, so that alpha comes before the rounding."""
    with torch.autocast(x.device.type, enabled=False):
        if x.is_cuda:
            return torch.mm(x, weight.T, out_dtype=torch.float32)
        return F.linear(x.float(), weight.float())
