"""The op that vLLM's layers call: `torch.ops.nvfp4r.vllm_linear`.

It is `torch.ops.nvfp4r.linear` with a limit on M, above which `gemm` takes over, and with a count
of every call by path. Limit and choice are inside the op: traced code holds one call whatever M is,
and a limit that Python tested outside would be frozen by torch.compile. It carries no layer name,
so that compiled graphs of equal layers stay equal.
"""

from __future__ import annotations

from torch import Tensor

from nvfp4r.custom_op import custom_op
from nvfp4r.launches import Layer, device_facts
from nvfp4r.ops import gemm, multiply
from nvfp4r.vllm.record import LayerShape, record


@custom_op("nvfp4r::vllm_linear")
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
        path = "unpack" if x.is_cuda and device_facts(x.device.index) else "reference"
    else:
        y, path = multiply(x, Layer(tiles, alpha, bias, input_scale, N, K, order, rotation))
    if M:
        shape = LayerShape(N, K, order, input_scale is not None, gemv_max_m, rotation)
        record().count(shape, path, M)
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
