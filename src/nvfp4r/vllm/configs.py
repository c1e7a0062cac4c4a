"""Where vLLM is told to use this project's layers: its own registration calls, and nothing else.

`register_quantization_config` replaces the configs of the two NVFP4 formats, "modelopt_fp4" and
"compressed-tensors", by subclasses of vLLM's own that hand out `NVFP4RLinearMethod` for NVFP4
linear layers (and heads) and leave everything else to their parents; replacing a known name is
allowed and logged there. One way for W4A4 and W4A16 in all known releases, which choose kernels
differently:

    release       ModelOpt W4A4   ModelOpt W4A16     compressed-tensors W4A4 / W4A16
    0.26          kernel list     Marlin, fixed      kernel list / Marlin, fixed
    0.27 to 0.29  kernel list     Marlin or Humming  kernel list / Marlin or Humming
    0.30 to 0.33  kernel list     by architecture    kernel list / by architecture

`register_linear_kernel` also appends `NVFP4RLinearKernel` to that kernel list, last, for NVFP4
layers of other configs (mixed precision); vLLM has then merged the global scales of fused layers.

Both are public in all of these, as are the methods and fields used of
configs: `is_layer_excluded`, `quant_method` (ModelOpt), `get_scheme_dict`, `transform_config`,
`CompressedTensorsMoEMethod` (compressed-tensors), `packed_modules_mapping`, `maybe_update_config`,
`VllmConfig.additional_config`, `KernelConfig.linear_backend`. No private name is used, and no
attribute of vLLM is replaced.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import (
    get_quantization_config,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    CompressedTensorsMoEMethod,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import PlatformEnum

import nvfp4r
from nvfp4r.checkpoint import load_checkpoint
from nvfp4r.checkpoint.dialects import Activations, Dialect
from nvfp4r.format import BLOCK
from nvfp4r.jit.module import inductor_starts_early
from nvfp4r.methods.rotation import Rotation
from nvfp4r.transforms import KEY, Scope, Transform, parse_transforms
from nvfp4r.vllm.kernel import NVFP4RLinearKernel
from nvfp4r.vllm.methods import NVFP4RLinearMethod
from nvfp4r.vllm.record import record
from nvfp4r.vllm.scales import shard_names
from nvfp4r.vllm.settings import Settings

_log = logging.getLogger("vllm.nvfp4r")

# vLLM's ModelOpt configs leave these unquantised whatever the exclusion list says.
_NEVER = ("vision_tower", "vision_model", "vit_large_projector")


def install() -> None:
    """Registers configs and kernel with vLLM, once in a process.

    Raises:
        RuntimeError: another plug-in has registered a config of the same name.
    """
    places = (
        ("modelopt_fp4", ModelOptNvFp4Config, NVFP4RModelOptConfig),
        ("compressed-tensors", CompressedTensorsConfig, NVFP4RCompressedTensorsConfig),
    )
    found = [get_quantization_config(name) for name, _, _ in places]
    if found == [ours for _, _, ours in places]:
        return
    for (name, stock, _), current in zip(places, found, strict=True):
        if current is not stock:
            raise RuntimeError(
                f"vLLM's quantisation config {name!r} has been replaced by "
                f"{current.__module__}.{current.__qualname__}, need vLLM's own; keep that plug-in "
                "or nvfp4r, and leave the other out with VLLM_PLUGINS"
            )
    for name, _, ours in places:
        register_quantization_config(name)(ours)
    for platform in (PlatformEnum.CUDA, PlatformEnum.CPU):
        register_linear_kernel(NVFP4RLinearKernel, platform, "nvfp4")


class NVFP4RModelOptConfig(ModelOptNvFp4Config):
    """ModelOpt's config, with this project's linear layers while the plug-in is on."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        is_linear = isinstance(layer, (LinearBase, ParallelLMHead))
        if (
            not is_linear
            or self.is_layer_excluded(prefix)
            or any(part in prefix for part in _NEVER)
        ):
            return super().get_quant_method(layer, prefix)
        stored: Activations = "none" if self.quant_method == "W4A16_NVFP4" else "nvfp4"
        ours = _method(self, layer, prefix, "modelopt", stored)
        return ours or super().get_quant_method(layer, prefix)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """As the parent; NVFP4 without input activations is W4A16, as 0.33 has it and 0.26 not."""
        is_nvfp4 = str(config.get("quant_algo")).upper() == "NVFP4"
        if Settings.from_environment().enabled and is_nvfp4 and _leaves_activations(config):
            config = {**config, "quant_algo": "W4A16_NVFP4"}
        return super().from_config(config)

    def maybe_update_config(self, model_name: str, *arguments: Any, **others: Any) -> None:
        super().maybe_update_config(model_name, *arguments, **others)
        check_checkpoint(model_name)


class NVFP4RCompressedTensorsConfig(CompressedTensorsConfig):
    """compressed-tensors' config, with this project's layers for NVFP4 while the plug-in is on."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if isinstance(layer, (LinearBase, ParallelLMHead)):
            stored = _nvfp4_scheme(self.get_scheme_dict(layer, prefix))
            if stored is not None:
                transform = self._transform_of(prefix)
                ours = _method(self, layer, prefix, "compressed-tensors", stored, transform)
                if ours is not None:
                    return ours
        method = super().get_quant_method(layer, prefix)
        if Settings.from_environment().enabled:
            self._require_rotated(layer, prefix, method)
        return method

    def _transform_of(self, name: str) -> Transform | None:
        """The rotation of an NVFP4 layer.

        Raises:
            ValueError: a transform that this project's layers do not compute, or one that leaves
                out the layer or some of what it is fused from.
        """
        if self.transform_config is None or not Settings.from_environment().enabled:
            return None
        try:
            transform = parse_transforms(self.transform_config.model_dump(mode="json"), KEY)
        except ValueError as error:
            raise ValueError(
                f"{error}; nvfp4r.disable(), or NVFP4R=0, leaves the model to vLLM's own layers"
            ) from error
        if transform is None:
            return None
        members = self.packed_modules_mapping.get(name.rpartition(".")[2])
        for shard in shard_names(name, members, len(members) if members else 1):
            if not transform.covers(shard):
                raise ValueError(
                    f"{shard}: is quantised, but the transform {transform.group} of {KEY} leaves "
                    "it out, need it on all quantised layers; quantise the original model with "
                    "reset-quantize"
                )
        return transform

    def _require_rotated(self, layer: Any, name: str, method: Any) -> None:
        """Refuses a layer of vLLM's own of a kind that knows no transforms but is covered by one.

        Raises:
            ValueError: names the layer.
        """
        if self.transform_config is None:
            return
        knows_none = isinstance(layer, ParallelLMHead) or isinstance(
            method, CompressedTensorsMoEMethod
        )
        for group, scheme in self.transform_config.config_groups.items():
            for entry in scheme.apply:
                scope = Scope(tuple(entry.targets), tuple(entry.ignore))
                if knows_none and entry.is_online() and scope.covers(name):
                    raise ValueError(
                        f"{name}: the transform {group} of {KEY} covers it, but vLLM runs heads "
                        "and experts without transforms, and nvfp4r cannot run it either; exclude "
                        "it when the model is quantised, or use a method without rotation"
                    )

    def maybe_update_config(self, model_name: str, *arguments: Any, **others: Any) -> None:
        super().maybe_update_config(model_name, *arguments, **others)
        schemes = self.target_scheme_map.values()
        if schemes and all(_nvfp4_scheme(scheme) is not None for scheme in schemes):
            check_checkpoint(model_name)


def check_checkpoint(model: str) -> None:
    """Refuses a local checkpoint whose scales do not fit together, before anything is loaded.

    Models on a hub are not on disk yet, and folders without weights (load_format="dummy") have
    nothing to check; their layers are checked one by one when they are loaded.

    Raises:
        ValueError: scales missing, zero, NaN or left over, or an exclusion list that splits a
            fused layer; names tensor and file.
    """
    folder = Path(model)
    if not Settings.from_environment().enabled or not any(folder.glob("*.safetensors")):
        return
    load_checkpoint(folder, check=False).require_sound_scales()


def _leaves_activations(config: dict[str, Any]) -> bool:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return False
    return all(
        isinstance(group, dict) and group.get("input_activations") is None
        for group in groups.values()
    )


def _nvfp4_scheme(scheme: Any) -> Activations | None:
    """What an NVFP4 scheme does with activations; None if it is another format."""
    if not scheme or not _is_nvfp4(scheme.get("weights")):
        return None
    if scheme.get("input_activations") is None:
        return "none"
    return "nvfp4" if _is_nvfp4(scheme["input_activations"]) else None


def _is_nvfp4(arguments: Any) -> bool:
    return arguments is not None and (
        arguments.num_bits == 4
        and arguments.type == "float"
        and arguments.strategy == "tensor_group"
        and arguments.group_size == BLOCK
        and bool(arguments.symmetric)
    )


def _method(
    config: Any,
    layer: Any,
    name: str,
    dialect: Dialect,
    stored: Activations,
    transform: Transform | None = None,
) -> NVFP4RLinearMethod | None:
    """This project's method for an NVFP4 layer, or None and a line that says why not.

    Args:
        stored: what the checkpoint says about activations.
        transform: the rotation of the layer's inputs.
    """
    reason = _reason_to_decline(config, stored)
    if reason is not None:
        if reason not in record().declined.values():
            _log.warning("nvfp4r: NVFP4 layers are left to vLLM: %s", reason)
        record().declined[layer] = reason
        return None
    _mark_compile_cache(None if transform is None else transform.rotation)
    members = config.packed_modules_mapping.get(name.rpartition(".")[2])
    return NVFP4RLinearMethod(dialect, stored, name, members, transform)


def _reason_to_decline(config: Any, stored: Activations) -> str | None:
    is_supported, reason = NVFP4RLinearKernel.is_supported()
    if not is_supported:
        return reason
    backend = _linear_backend("nvfp4_w4a4" if stored == "nvfp4" else "nvfp4_w4a16")
    if backend != "auto":
        return f"--linear-backend is {backend}; leave it at auto for nvfp4r"
    if NVFP4RLinearKernel.__name__ in envs.VLLM_DISABLED_KERNELS:
        return f"VLLM_DISABLED_KERNELS names {NVFP4RLinearKernel.__name__}"
    if envs.VLLM_BATCH_INVARIANT:
        return (
            "VLLM_BATCH_INVARIANT is set, and a row's bits depend on the number of tokens where "
            "one kernel or plan of nvfp4r hands over to another (above 8 tokens, for example)"
        )
    if getattr(config, "online_quantization_config", None) is not None:
        return "a quantisation config asks for requantisation while loading"
    return None


def _linear_backend(kind: str) -> str:
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        return "auto"
    kernels = vllm_config.kernel_config
    special = getattr(kernels, "linear_backend_per_quant", None) or {}  # since 0.27 or later
    return special.get(kind) or kernels.linear_backend


def _mark_compile_cache(rotation: Rotation | None) -> None:
    """Makes the settings and the rotation part of the key of vLLM's compile caches, and whether
    Inductor's kernels start early.

    Graphs that were compiled with other layers, or another gemv_max_m, would be found otherwise.
    """
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        return
    additional = vllm_config.additional_config
    if not isinstance(additional, dict):
        raise ValueError(
            f"additional_config is a {type(additional).__name__}, need a dict, to which nvfp4r "
            "adds its settings: they are part of what compiled graphs depend on"
        )
    settings = Settings.from_environment()
    more: dict[str, str] = {} if rotation is None else {"rotation": rotation}
    if inductor_starts_early():
        more["inductor"] = "starts early"
    additional["nvfp4r"] = {"version": nvfp4r.__version__, **settings.environment(), **more}
