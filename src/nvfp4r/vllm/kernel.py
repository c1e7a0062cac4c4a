"""The linear kernel of this project in vLLM's own terms: `NvFp4LinearKernel`.

It packs a layer once, after loading, into `weight` (the tiles of docs/layout.md) and `alpha`, frees
what was loaded, and leaves everything else to `torch.ops.nvfp4r.vllm_linear`. Used through
`vllm.model_executor.kernels.linear`, public in 0.26 to 0.33: `NvFp4LinearKernel`,
`NvFp4LinearLayerConfig`. Nothing private is touched.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from vllm.model_executor.kernels.linear import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.platforms import current_platform

import nvfp4r.vllm.op  # noqa: F401 - registers torch.ops.nvfp4r.vllm_linear
from nvfp4r.checkpoint.dialects import Activations
from nvfp4r.format import NVFP4Tensor
from nvfp4r.jit import UnsupportedGPUError, load_module, target_for
from nvfp4r.launches import required_facts
from nvfp4r.methods.rotation import Rotation
from nvfp4r.packed import ORDERS, pack
from nvfp4r.vllm.record import LayerEntry, LayerShape, record
from nvfp4r.vllm.settings import Settings, resolve_activations

_log = logging.getLogger("vllm.nvfp4r")

_FP4_UNITS = (10, 0)  # compute capability that they came with


class NVFP4RLinearKernel(NvFp4LinearKernel):
    """y = alpha * (x w^T) + bias by `torch.ops.nvfp4r.vllm_linear`, for any M, N and K % 16 == 0.

    One object serves one layer. Activations are rounded to NVFP4 or not as `Settings.activations`,
    the checkpoint and the GPU say together. With a rotation, x is rotated first.
    """

    def __init__(self, config: NvFp4LinearLayerConfig, rotation: Rotation | None = None) -> None:
        super().__init__(config)
        self.rotation = rotation
        self.settings = Settings.from_environment()
        self.token_limit = self.settings.token_limit
        self.order = ""
        self.rounds_activations = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Off means not supported; so does a GPU that the kernels are not built for."""
        if not Settings.from_environment().enabled:
            return False, "nvfp4r is off: nvfp4r.enable() or NVFP4R=1 switches it on"
        if current_platform.is_cpu():
            return True, None
        if not current_platform.is_cuda():
            return False, f"nvfp4r runs on CUDA and CPUs, not on {current_platform.device_name}"
        capability = _capability() if compute_capability is None else divmod(compute_capability, 10)
        try:
            target_for(capability)
        except UnsupportedGPUError as error:
            return False, str(error)
        return True, None

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        """Every NVFP4 layer; sizes that are illegal are refused when the layer is built."""
        return True, None

    def resolve(self, stored: Activations) -> tuple[Activations, str]:
        """What is done with activations that the checkpoint stores like this, and why.

        Raises:
            ValueError: the settings want 4-bit activations, and the checkpoint has no scales.
        """
        return resolve_activations(stored, self.settings.activations, *_device())

    def process_weights_after_loading(self, layer: Any) -> None:
        """For layers to which vLLM itself gave this kernel; it has merged their scales before."""
        stored: Activations = "nvfp4" if hasattr(layer, "input_global_scale") else "none"
        self.pack_layer(layer, getattr(layer, "prefix", type(layer).__name__), "vllm", stored)

    def pack_layer(
        self, layer: Any, name: str, dialect: str, stored_activations: Activations
    ) -> None:
        """Packs what a layer has loaded; afterwards it holds nothing else.

        Args:
            layer: with `weight` uint8 [N, K/2], `weight_scale` float8_e4m3fn [N, K/16],
                `weight_global_scale` float32 [] or [N], and, for 4-bit activations,
                `input_global_scale` float32 []; all multipliers, in rows. They give way to
                `weight` (tiles) and `alpha`; an input scale that is not needed is dropped.
            name: what errors and the status call the layer.
            dialect: of the checkpoint, for the status.
            stored_activations: what the checkpoint says.

        Raises:
            ValueError: unsound scales, or a dtype that there are no kernels for; names the layer.
            ImportError, CompileError, RuntimeError: the kernels could not be compiled or loaded.
        """
        self.order = ORDERS[checked_dtype(layer.params_dtype, name)]
        activations, reason = self.resolve(stored_activations)
        self.rounds_activations = activations == "nvfp4"
        weight = NVFP4Tensor(
            layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data
        )
        index = weight.device.index
        if weight.device.type == "cuda":
            load_module(index)  # now, so that neither the first token nor a capture waits for it
        packed = pack(weight, ORDERS[layer.params_dtype], name=name)
        _replace(layer, "weight", packed.tiles)
        _replace(layer, "alpha", packed.alpha)
        for used in ("weight_scale", "weight_global_scale", "input_global_scale_inv"):
            if hasattr(layer, used):
                delattr(layer, used)
        if self.rounds_activations:
            _replace(layer, "input_global_scale", layer.input_global_scale.data.reshape(()))
        elif hasattr(layer, "input_global_scale"):
            del layer.input_global_scale
        entry = LayerEntry(
            name=name,
            shape=LayerShape(
                packed.N,
                packed.K,
                self.order,
                self.rounds_activations,
                self.token_limit,
                self.rotation,
            ),
            dialect=dialect,
            stored_activations=stored_activations,
            reason=reason,
            architecture=_architecture(),
            facts=required_facts(index) if weight.device.type == "cuda" else None,
            global_scales=packed.alpha.unique().numel(),
            device_index=index,
        )
        if not record().layers:
            _log.info(
                "nvfp4r: NVFP4 linear layers run on torch.ops.nvfp4r (%s); activations %s: %s",
                entry.architecture,
                activations,
                reason,
            )
        record().layers[layer] = entry

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., K] in the dtype that the layer was packed for -> [..., N]."""
        y: Tensor = torch.ops.nvfp4r.vllm_linear(
            x,
            layer.weight,
            layer.alpha,
            bias,
            layer.input_global_scale if self.rounds_activations else None,
            layer.output_size_per_partition,
            layer.input_size_per_partition,
            self.order,
            self.token_limit,
            self.rotation,
        )
        return y


def checked_dtype(dtype: torch.dtype, name: str) -> torch.dtype:
    """The dtype of activations, if there are kernels for it.

    Raises:
        ValueError: there are none; names the layer and the flag.
    """
    if dtype not in ORDERS:
        raise ValueError(
            f"{name}: the model runs in {dtype}, but nvfp4r has kernels for "
            f"{', '.join(map(str, ORDERS))} alone; choose one of them with --dtype"
        )
    return dtype


def _replace(layer: Any, name: str, tensor: Tensor) -> None:
    """Registers a parameter, which vLLM's reloading and LoRA know how to find."""
    if hasattr(layer, name):
        delattr(layer, name)
    layer.register_parameter(name, Parameter(tensor, requires_grad=False))


def _capability() -> tuple[int, int]:
    found: Any = current_platform.get_device_capability()
    return found.major, found.minor


def _device() -> tuple[bool, str]:
    """(whether it has FP4 units, its name)."""
    if current_platform.is_cpu():
        return False, "a CPU"
    return _capability() >= _FP4_UNITS, current_platform.get_device_name()


def _architecture() -> str:
    return "cpu" if current_platform.is_cpu() else target_for(_capability()).sm
