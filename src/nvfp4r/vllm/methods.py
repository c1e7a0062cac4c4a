"""One vLLM linear method for NVFP4 layers of either dialect, W4A4 and W4A16.

vLLM's own methods merge the global scales of fused layers to their maximum before any kernel sees
them. This one registers the stored tensors itself, so that each part keeps its scale, and fills
scales with NaN first, so that one which is never loaded is found.

Public in 0.26 to 0.33, nothing private is touched: `LinearMethodBase`,
`register_weight_loader_v2_supported_method` (fused layers look the method up by class name),
`ModelWeightParameter`, `PerTensorScaleParameter`, `NvFp4LinearLayerConfig`, `set_weight_attrs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from vllm.model_executor.kernels.linear import NvFp4LinearLayerConfig
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import ModelWeightParameter, PerTensorScaleParameter
from vllm.model_executor.utils import set_weight_attrs

from nvfp4r.checkpoint.dialects import TENSOR_NAMES, Activations, Dialect
from nvfp4r.format import BLOCK
from nvfp4r.transforms import Transform, is_stored_matrix
from nvfp4r.vllm.kernel import NVFP4RLinearKernel, checked_dtype
from nvfp4r.vllm.scales import input_scale, row_scales, shard_names


@register_weight_loader_v2_supported_method
class NVFP4RLinearMethod(LinearMethodBase):
    """Loads the tensors of one NVFP4 layer and computes with them.

    Args:
        dialect: how the tensors are named, and whether global scales are divisors.
        activations: what the checkpoint says: "nvfp4" (W4A4) or "none" (W4A16).
        name: of the layer.
        members: last name components of what the layer is fused from, None if it is not or if
            vLLM does not say.
        transform: the rotation of the layer's inputs, to which its stored weights belong.
    """

    def __init__(
        self,
        dialect: Dialect,
        activations: Activations,
        name: str,
        members: Sequence[str] | None,
        transform: Transform | None = None,
    ) -> None:
        self.dialect = dialect
        self.activations = activations
        self.name = name
        self.members = members
        self.transform = transform
        rotation = None if transform is None else transform.rotation
        self.kernel = NVFP4RLinearKernel(NvFp4LinearLayerConfig(), rotation)

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers the stored tensors, N and K of this rank.

        Raises:
            ValueError: K of this rank is no multiple of 16, or a dtype without kernels.
        """
        N, K = sum(output_partition_sizes), input_size_per_partition
        if K % BLOCK:
            raise ValueError(
                f"{self.name}: K={K} on this rank (of {input_size}), need a multiple of {BLOCK}, "
                "the columns that share a block scale; choose another --tensor-parallel-size"
            )
        checked_dtype(params_dtype, self.name)
        names = TENSOR_NAMES[self.dialect]
        loader = extra_weight_attrs.get("weight_loader")
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = K
        layer.output_size_per_partition = N
        layer.params_dtype = params_dtype
        block_scale = torch.full((N, K // BLOCK), torch.nan).to(torch.float8_e4m3fn)
        for field, data in (
            (names.codes, torch.empty((N, K // 2), dtype=torch.uint8)),
            (names.block_scale, block_scale),
        ):
            parameter = ModelWeightParameter(
                data=data, input_dim=1, output_dim=0, weight_loader=loader
            )
            layer.register_parameter(field, parameter)
        # W4A16 checkpoints may carry input scales that nothing uses; they need a place to go.
        for field in (names.global_scale, names.input_scale):
            slots = torch.full((len(output_partition_sizes),), torch.nan, dtype=torch.float32)
            layer.register_parameter(
                field, PerTensorScaleParameter(data=slots, weight_loader=loader)
            )
        if self.transform is not None:
            layer.add_module(self.transform.submodule, _StoredMatrix(self.name))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Gives the kernel one global scale per row, and one input scale.

        Raises:
            ValueError: scales that are missing, zero, negative, NaN or infinite, or a head that
                is tied to an embedding; names the tensor.
        """
        names = TENSOR_NAMES[self.dialect]
        codes = getattr(layer, names.codes).data
        if codes.dtype != torch.uint8:
            raise ValueError(
                f"{self.name}: {names.codes} is {codes.dtype}, need the codes in uint8; if the "
                "head is tied to the embedding, exclude it: add lm_head to the exclusion list of "
                "the checkpoint's configuration"
            )
        block_scale = getattr(layer, names.block_scale).data
        shards = shard_names(self.name, self.members, len(layer.logical_widths))
        alpha = row_scales(
            getattr(layer, names.global_scale).data,
            layer.logical_widths,
            [f"{shard}.{names.global_scale}" for shard in shards],
            names.stores_divisors,
        )
        input_slots = getattr(layer, names.input_scale).data
        for field in {names.codes, names.block_scale, names.global_scale, names.input_scale}:
            delattr(layer, field)
        layer.weight = _parameter(codes)
        layer.weight_scale = _parameter(block_scale)
        layer.weight_global_scale = _parameter(alpha.to(codes.device))
        if self.kernel.resolve(self.activations)[0] == "nvfp4":
            scale = input_scale(
                input_slots,
                [f"{shard}.{names.input_scale}" for shard in shards],
                names.stores_divisors,
            )
            layer.input_global_scale = _parameter(scale.to(codes.device))
        self.kernel.pack_layer(layer, self.name, self.dialect, self.activations)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., K] -> [..., N]."""
        return self.kernel.apply_weights(layer, x, bias)


class _StoredMatrix(torch.nn.Module):
    """Where the matrix of a rotation goes that a checkpoint may hold: it is checked, not kept."""

    weight: Parameter

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.weight = _parameter(torch.empty(0))

        def check(parameter: Parameter, loaded: Tensor, *shard: object) -> None:
            if not is_stored_matrix(loaded):
                raise ValueError(
                    f"{layer}: the matrix stored with its rotation is not the Hadamard matrix of 1 "
                    "and -1 in Sylvester's order; nvfp4r computes no other rotation, quantise the "
                    "original model with reset-quantize"
                )

        set_weight_attrs(self.weight, {"weight_loader": check})


def _parameter(tensor: Tensor) -> Parameter:
    return Parameter(tensor, requires_grad=False)
