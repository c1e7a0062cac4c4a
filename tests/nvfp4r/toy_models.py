"""Two-layer transformers models and their NVFP4 checkpoints, for tests that need a whole model."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nvfp4r.checkpoint.writer import save_checkpoint
from nvfp4r.format import NVFP4Tensor
from nvfp4r.quantize import quantize

VOCAB = 128
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),  # q, k and v have a bias
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def toy_model(kind: str, *, tied: bool = False, dtype: torch.dtype = torch.float32):
    """A model with random weights, biases and norms, in eval mode."""
    config_class, model_class = KINDS[kind]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        dtype=dtype,
    )
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def token_ids(*shape: int) -> Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(1))


def linear_names(model: nn.Module, *, head: bool = False) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (head or name != "lm_head")
    ]


def config_of(model: PreTrainedModel) -> dict:
    return json.loads(model.config.to_json_string())


def named_tensors(model: PreTrainedModel, names: Iterable[str]) -> dict[str, Tensor | NVFP4Tensor]:
    """The model's tensors as a checkpoint holds them, the named linears quantised."""
    quantised = {f"{name}.weight" for name in names}
    tensors: dict[str, Tensor | NVFP4Tensor] = {
        name: quantize(value, name=name) if name in quantised else value.detach().clone()
        for name, value in model.state_dict().items()
    }
    if model.config.tie_word_embeddings and "lm_head.weight" not in quantised:
        del tensors["lm_head.weight"]
    return tensors


def save_quantised(
    model: PreTrainedModel,
    folder: Path,
    *,
    dialect: str = "modelopt",
    input_scales: Mapping[str, Tensor] | None = None,
    tensors: Mapping[str, Tensor | NVFP4Tensor] | None = None,
    config: Mapping | None = None,
    exclude: tuple[str, ...] = ("lm_head",),
) -> dict[str, Tensor | NVFP4Tensor]:
    """Writes a checkpoint (W4A4 if there are input scales) and returns its tensors."""
    tensors = dict(tensors or named_tensors(model, linear_names(model)))
    save_checkpoint(
        folder,
        tensors.items(),
        config=config or config_of(model),
        dialect=dialect,
        activations="none" if input_scales is None else "nvfp4",
        input_scales=input_scales,
        exclude=exclude,
    )
    return tensors


def dequantised(
    model: PreTrainedModel, tensors: Mapping[str, Tensor | NVFP4Tensor], dtype: torch.dtype
) -> PreTrainedModel:
    """The plain model of `dtype` on the dequantised weights: the truth for W4A16.

    transformers loads it itself, so it also decides what stays in float32 (rotary frequencies do).
    """
    state = {
        name: tensor.dequantize(dtype) if isinstance(tensor, NVFP4Tensor) else tensor
        for name, tensor in tensors.items()
    }
    config = copy.deepcopy(model.config)
    plain = type(model).from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    return plain.eval()
