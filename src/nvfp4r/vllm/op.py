"""The op that vLLM's layers call: `torch.ops.nvfp4r.vllm_linear`.

It is `torch.ops.nvfp4r.linear` with a limit on M, above which `gemm` takes over, and with a count
of every call by path. Limit and choice are inside the op: traced code holds one call whatever M is,
and a limit that Python tested outside would be frozen by torch.compile. It carries no layer name,
so that compiled graphs of equal layers stay equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4r.launches import Layer, device_facts
from nvfp4r.ops import gemm, multiply
from nvfp4r.vllm.record import LayerShape, path_for, record


@torch.library.custom_op("nvfp4r::vllm_linear", mutates_args=())
def vllm_linear(
    x: Tensor,
    tiles: Tensor,
    alpha: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    N: int,
    K: int,
    order: str,
    gemv_max_m: int,
    rotation: str | None = None,
) -> Tensor:
    """As `torch.ops.nvfp4r.linear`, but by `gemm` above `gemv_max_m` tokens (NO_LIMIT: never)."""
    M = x.numel() // K
    if gemv_max_m < M:
        y = gemm(x, tiles, alpha, bias, input_scale, N, K, order, rotation)
    else:
        y = multiply(x, Layer(tiles, alpha, bias, input_scale, N, K, order, rotation))
    if M:
        shape = LayerShape(N, K, order, input_scale is not None, gemv_max_m, rotation)
        index = x.device.index
        facts = device_facts(index) if x.is_cuda else None
        record().count(shape, path_for(M, shape, facts, index)[0], M)
    return y


@vllm_linear.register_fake
def _(
    x: Tensor,
    tiles: Tensor,
    alpha: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    N: int,
    K: int,
    order: str,
    gemv_max_m: int,
    rotation: str | None = None,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], N))
