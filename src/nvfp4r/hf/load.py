"""NVFP4 checkpoints as transformers models, on a CPU or a GPU, without a quantiser package.

The model is built without memory for its weights; the checkpoint then streams through it tensor by
tensor, each going to its place once; on a GPU each quantised matrix is packed for the kernels as
it arrives. This module knows transformers; reading files is the business of checkpoint/, arithmetic
that of linear.py.

Experts that transformers fuses into one parameter (mixture-of-experts models) are not linear layers
and are refused. KV-cache scales are not used: the cache keeps the model's dtype.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)

from nvfp4r.checkpoint import NVFP4Checkpoint, load_checkpoint
from nvfp4r.checkpoint.dialects import CONFIG_FILE, Activations
from nvfp4r.format import NVFP4Tensor
from nvfp4r.jit import UnsupportedGPUError, load_module
from nvfp4r.linear import NVFP4Linear
from nvfp4r.packed import ORDERS

_log = logging.getLogger(__name__)

ActivationChoice = Literal["checkpoint", "none", "nvfp4"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_GENERATION_FILE = "generation_config.json"
_SHOWN = 8  # names listed in one message


def load_model(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | Literal["auto"] = "auto",
    activations: ActivationChoice = "checkpoint",
    keep_dequantized: bool = True,
    packed: bool | None = None,
) -> PreTrainedModel:
    """Loads an NVFP4 checkpoint of either dialect as a transformers causal language model.

    With activations off and nothing packed, its logits are those of the ordinary model on the
    dequantised weights, bit for bit. A packed model (see `packed`) differs in rounding only: its
    products with the 4-bit weights are exact, its sums float32, and each result is rounded once,
    whereas the dequantised model rounds each weight to `dtype` first. Save a model of either kind
    with `nvfp4r.save_checkpoint`, not with `save_pretrained`.

    Args:
        path: checkpoint folder.
        device: where the whole model goes.
        dtype: of everything that is not quantised and of the computation; "auto" is what
            config.json says, or else the dtype of the first floating-point parameter.
        activations: "checkpoint" does what the checkpoint says; "none" leaves activations alone;
            "nvfp4" emulates 4-bit ones and needs a checkpoint with input scales.
        keep_dequantized: keep each dequantised matrix after first use (as fast as an ordinary
            model, for 2 or 4 bytes per weight on top); otherwise dequantise in every call. Without
            meaning in a packed model, which keeps none.
        packed: hold quantised weights once, in the order of the CUDA kernels, 0.56 bytes each
            (`NVFP4Linear.pack_`). None, the default, packs on CUDA in bfloat16 or float16, unless
            the kernels are not built for the GPU or NVRTC or cuda-bindings are missing, which one
            warning says. False leaves them as they are. True packs on any device (on a CPU it
            saves memory, not time) or raises.
            The kernels are compiled, once per machine, and loaded before any weight is read. They
            serve up to 192 tokens at a time, and any number on compute capability 9.0; elsewhere
            more, as in a prompt, make each call unpack it all.

    Returns:
        The model in eval mode, parameters without gradients, tied weights tied, `NVFP4Linear` in
        place of each quantised `torch.nn.Linear`.

    Raises:
        ValueError: an unusable checkpoint (see `load_checkpoint`), a model type that transformers
            does not know, activations that the checkpoint has no scales for, parameters that do
            not fit the model, or `packed` in a dtype that has no kernels; names them.
        ImportError: `packed` is True on CUDA, and cuda-bindings or NVRTC is missing.
        UnsupportedGPUError: `packed` is True, and the kernels are not built for this GPU.
        CompileError, RuntimeError: the kernels were not compiled or not loaded
            (`nvfp4r.jit.load_module`); `packed=False` needs none.

    Example:
        >>> model = load_model("Qwen3-8B-NVFP4", device="cuda")            # doctest: +SKIP
        >>> model.generate(**tokenizer("2+2=", return_tensors="pt"))       # doctest: +SKIP
    """
    if dtype != "auto" and dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}, need 'auto' or one of {list(_DTYPES)}")
    checkpoint = load_checkpoint(path)
    resolved = _resolve_activations(checkpoint, activations)
    if checkpoint.kv_scales:
        _log.info(
            "%s: holds %d KV-cache scales; they are not used, the cache keeps the model's dtype",
            path,
            len(checkpoint.kv_scales),
        )
    device = torch.device(device)
    model = _empty_model(checkpoint, dtype)
    ignored, missing = _match_names(model, checkpoint)
    packing_dtype = _packing_dtype(packed, device, model.dtype)
    for name, tensor in checkpoint.items():
        if name in ignored:
            continue
        if isinstance(tensor, NVFP4Tensor):
            module = name.removesuffix(".weight")
            # The bias is still on the meta device if it has not been read yet.
            bias = getattr(model.get_submodule(module), "bias", None)
            layer = NVFP4Linear(
                tensor.to(device),
                bias,
                input_scale=checkpoint.input_scale(module) if resolved == "nvfp4" else None,
                activations=resolved,
                keep_dequantized=keep_dequantized,
                name=module,
                rotation=checkpoint.rotation,
            )
            if packing_dtype is not None:
                layer.pack_(packing_dtype)
            model.set_submodule(module, layer)
        else:
            _assign(model, name, tensor, device)
        del tensor  # before the next one is read: one unpacked matrix at a time
    _tie(model, missing, checkpoint.modules)
    # Left are buffers that the model computes itself, such as rotary frequencies.
    nn.Module.to(model, device)
    generation_file = Path(path) / _GENERATION_FILE
    if generation_file.is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model.eval()


def saturation(model: nn.Module) -> dict[str, int]:
    """Clipped activation blocks of every layer that quantises its activations, by module name.

    Logs a warning for each layer with any; waits for the device.
    """
    return {
        name: module.check_saturation()
        for name, module in model.named_modules()
        if isinstance(module, NVFP4Linear) and module.activations == "nvfp4"
    }


def _resolve_activations(checkpoint: NVFP4Checkpoint, wanted: ActivationChoice) -> Activations:
    if wanted not in get_args(ActivationChoice):
        raise ValueError(
            f"activations is {wanted!r}, need one of {', '.join(get_args(ActivationChoice))}"
        )
    if wanted == "checkpoint":
        return checkpoint.activations
    if wanted == "nvfp4" and checkpoint.activations == "none":
        raise ValueError(
            f"{checkpoint.path}: is W4A16, so it holds no input scales, but activations='nvfp4' "
            "needs them; run reset-quantize --activations nvfp4 on the original model, or use "
            "activations='none'"
        )
    return wanted


def _packing_dtype(
    packed: bool | None, device: torch.device, dtype: torch.dtype
) -> torch.dtype | None:
    """What to pack layers for, None to leave them as they are; on CUDA the kernels are loaded."""
    if packed is False or (packed is None and (device.type != "cuda" or dtype not in ORDERS)):
        return None
    if dtype not in ORDERS:
        raise ValueError(
            f"packed is True and dtype {dtype}, need one of {list(ORDERS)}; leave packed out, or "
            "choose another dtype"
        )
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        try:
            load_module(index)  # now, so that neither the first token nor a capture waits for it
        except (ImportError, UnsupportedGPUError) as error:
            if packed:
                raise
            _log.warning(
                "weights are dequantised on %s, as the NVFP4 kernels do not run there: %s",
                device,
                error,
            )
            return None
    return dtype


def _empty_model(
    checkpoint: NVFP4Checkpoint, dtype: torch.dtype | Literal["auto"]
) -> PreTrainedModel:
    """The model of config.json with its parameters on the meta device, its buffers computed."""
    where = checkpoint.path / CONFIG_FILE
    model_type = str(checkpoint.config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"{where}: model_type is {model_type!r}, which transformers {transformers.__version__} "
            "does not know; update transformers (models that bring their own code are not "
            "supported)"
        )
    config: Any = CONFIG_MAPPING[model_type].from_dict(dict(checkpoint.config))
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{where}: model_type is {model_type!r}, which transformers does not have as a causal "
            "language model; need one"
        )
    config.name_or_path = str(checkpoint.path)
    if dtype == "auto":
        dtype = config.dtype or _first_floating_dtype(checkpoint)
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def _first_floating_dtype(checkpoint: NVFP4Checkpoint) -> torch.dtype:
    quantised = {f"{module}.weight" for module in checkpoint.modules}
    for name in checkpoint.names():
        tensor = None if name in quantised else checkpoint[name]
        if isinstance(tensor, Tensor) and tensor.dtype in _DTYPES:
            return tensor.dtype
    raise ValueError(
        f"{checkpoint.path / CONFIG_FILE}: no dtype, and no parameter to take it from; "
        "pass dtype=torch.bfloat16"
    )


def _match_names(model: PreTrainedModel, checkpoint: NVFP4Checkpoint) -> tuple[set[str], set[str]]:
    """Compares the checkpoint's parameters with the model's, by name and shape.

    Returns:
        ignored: stored names that this kind of model is known not to use.
        missing: names of the model that are not stored, all of them tied to one that is.
    """
    where, kind = checkpoint.path, type(model).__name__
    slots = model.state_dict()
    stored = set(checkpoint.names())
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    unexpected = [name for name in checkpoint.names() if name not in slots]
    ignored = {n for n in unexpected if any(re.search(pattern, n) for pattern in patterns)}
    modules = dict(model.named_modules(remove_duplicate=False))
    foreign = [
        module
        for module in checkpoint.modules
        if f"{module}.weight" not in ignored and not isinstance(modules.get(module), nn.Linear)
    ]
    if foreign:
        raise ValueError(
            f"{where}: {_listed(foreign)} quantised, but no torch.nn.Linear of {kind}; "
            f"{_remedy(foreign)}"
        )
    surplus = [name for name in unexpected if name not in ignored]
    if surplus:
        raise ValueError(
            f"{where}: {_listed(surplus)} stored, but unknown to {kind}; {_remedy(surplus)}"
        )
    missing = {name for name in slots if name not in stored}
    lost = missing - _supplied_by_tying(model, missing)
    if lost:
        raise ValueError(
            f"{where}: {_listed(sorted(lost))} missing, but {kind} needs it; "
            "the checkpoint is incomplete, fetch or export it again"
        )
    for name in checkpoint.names():
        got = checkpoint.info(name).shape
        if name in slots and tuple(slots[name].shape) != got:
            raise ValueError(
                f"{where}: {name} has shape {list(got)}, but {kind} needs "
                f"{list(slots[name].shape)}; {_remedy([name])}"
            )
    return ignored, missing


def _supplied_by_tying(model: PreTrainedModel, missing: Collection[str]) -> set[str]:
    """Names among `missing` that are tied to a name that is not."""
    pairs = model.all_tied_weights_keys.items()
    return {
        absent
        for target, source in pairs
        for absent, present in ((target, source), (source, target))
        if absent in missing and present not in missing
    }


def _tie(model: PreTrainedModel, missing: set[str], quantised: Collection[str]) -> None:
    """Ties what the model ties; parameters that are stored apart and differ stay apart."""
    for target, source in list(model.all_tied_weights_keys.items()):
        if {target.removesuffix(".weight"), source.removesuffix(".weight")} & set(quantised):
            model.all_tied_weights_keys.pop(target)
            model.config.tie_word_embeddings = False  # for calls of tie_weights() to come
    model.tie_weights(missing_keys=missing, recompute_mapping=False)


def _assign(model: PreTrainedModel, name: str, tensor: Tensor, device: torch.device) -> None:
    """Puts a parameter or buffer in its place, in the dtype that the model wants for it."""
    module_name, _, field = name.rpartition(".")
    module = model.get_submodule(module_name)
    slot: Tensor = getattr(module, field)
    dtype = slot.dtype
    if slot.is_floating_point() and _stays_float32(model, name, dtype):
        dtype = torch.float32
    value = tensor.to(device, dtype)
    if isinstance(slot, nn.Parameter):
        value = nn.Parameter(value, requires_grad=False)
    setattr(module, field, value)


def _stays_float32(model: PreTrainedModel, name: str, dtype: torch.dtype) -> bool:
    """Whether transformers keeps this parameter in float32 in a 16-bit model."""
    marks: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        marks.update(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        marks.update(model._keep_in_fp32_modules or ())
    return any(re.search(mark.replace("*", ".*"), name) for mark in marks)


def _remedy(names: Iterable[str]) -> str:
    if any(".experts." in name for name in names):
        return (
            "transformers fuses the experts of such a model into one parameter, which this loader "
            "does not support; run the checkpoint in vLLM"
        )
    return f"is {CONFIG_FILE} the one that belongs to these weights?"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
