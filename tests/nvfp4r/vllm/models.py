"""Two-layer models for real engines, as NVFP4 checkpoints and as their dequantised twins.

Global scales are powers of two here: then every dequantised weight is a bfloat16 number, and a
checkpoint and its twin hold the same matrices, bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from nvfp4r import NVFP4Tensor, quantize, save_checkpoint

VOCABULARY = 140  # no multiple of 64, to which vLLM pads
PROMPTS = ([3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [100])
INPUT_SCALE = 2.0**-9

Tensors = dict[str, "Tensor | NVFP4Tensor"]


def make_model(kind: str = "llama") -> nn.Module:
    """A random model with heads that vLLM has a CPU kernel for; "qwen2" has biases on q, k, v."""
    classes = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
    config_class, model_class = classes[kind]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=160,  # a multiple of 16 and of 32, not of 128
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.2,
        dtype=torch.bfloat16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    model = model_class(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=2.0)
    return model


def power_of_two_scale(weight: Tensor, extra: int = 0) -> Tensor:
    """The smallest power of two under which nothing saturates, times 2**extra."""
    exponent = math.ceil(math.log2(float(weight.abs().max()) / 2688))
    return torch.tensor(2.0 ** (exponent + extra))


def quantised(
    model: nn.Module, *, head: bool = False, extra: Callable[[str], int] = lambda name: 0
) -> Tensors:
    """The model's tensors with its linear layers quantised.

    Args:
        head: quantise lm_head as well.
        extra: by layer name, by which power of two its global scale is larger than it has to be.
    """
    linear = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if not head:
        linear.discard("lm_head.weight")
    tensors: Tensors = {}
    for name, value in model.state_dict().items():
        if name in linear:
            scale = power_of_two_scale(value, extra(name.removesuffix(".weight")))
            tensors[name] = quantize(value, global_scale=scale, name=name)
        else:
            tensors[name] = value.detach().clone()
    return tensors


def save(
    folder: Path,
    model: nn.Module,
    tensors: Tensors,
    dialect: str = "modelopt",
    *,
    input_scale: float | None = None,
    config: Mapping[str, object] | None = None,
) -> Path:
    """Writes an NVFP4 checkpoint, W4A4 if there is an input scale."""
    modules = [n.removesuffix(".weight") for n, t in tensors.items() if isinstance(t, NVFP4Tensor)]
    scales = None
    if input_scale is not None:
        scales = {module: torch.tensor(input_scale) for module in modules}
    save_checkpoint(
        folder,
        tensors.items(),
        config=config or json.loads(model.config.to_json_string()),
        dialect=dialect,
        activations="none" if scales is None else "nvfp4",
        input_scales=scales,
        exclude=() if "lm_head" in modules else ("lm_head",),
    )
    return folder


def save_twin(folder: Path, model: nn.Module, tensors: Tensors) -> Path:
    """Writes the dequantised bfloat16 model; it holds the same weights, bit for bit."""
    plain = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, NVFP4Tensor):
            exact = tensor.dequantize(torch.float32)
            plain[name] = exact.to(torch.bfloat16)
            assert torch.equal(plain[name].float(), exact)
        else:
            plain[name] = tensor
    folder.mkdir()
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(model.config.to_json_string())
    return folder
