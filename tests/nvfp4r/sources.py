"""Small unquantised checkpoints, as a quantiser gets them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INTERMEDIATE, VOCABULARY = 32, 48, 64
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (16, HIDDEN),
    "self_attn.v_proj": (16, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
}


def llama_tensors(
    layers: int = 2, *, tied: bool = False, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """The tensors of a llama with biased q_proj, each module of another magnitude."""
    random = torch.Generator().manual_seed(0)

    def floats(*shape: int, size: float = 1.0) -> Tensor:
        return (size * torch.randn(shape, generator=random)).to(dtype)

    tensors = {"model.embed_tokens.weight": floats(VOCABULARY, HIDDEN)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}input_layernorm.weight"] = floats(HIDDEN)
        tensors[f"{prefix}self_attn.q_proj.bias"] = floats(HIDDEN)
        for i, (name, shape) in enumerate(LINEARS.items()):
            tensors[f"{prefix}{name}.weight"] = floats(*shape, size=0.02 * (1 + i + layer))
    tensors["model.norm.weight"] = floats(HIDDEN)
    if not tied:
        tensors["lm_head.weight"] = floats(VOCABULARY, HIDDEN)
    return tensors


def write_source(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    shards: Sequence[Sequence[str]] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a model folder; `shards` lists the tensors of each file, one file by default."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    if shards is None:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for i, names in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file({n: tensors[n] for n in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
