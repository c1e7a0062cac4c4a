"""The model: sizes, a fresh one, and its folder on disk. Qwen3's architecture, a small vocabulary.

Knows transformers; trains and decodes nothing.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from lab.pocket_reasoner import tokenizer

MAX_POSITIONS = 1024
LARGEST_BYTES = 16 * 2**20
"""Of the weights file in bfloat16: it lives in the repository."""


@dataclass(frozen=True)
class Sizes:
    """Dimensions of the model; the defaults make 6.3 million parameters."""

    hidden: int = 256
    intermediate: int = 768
    layers: int = 8
    heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 64

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate"):
            if getattr(self, name) < 16 or getattr(self, name) % 16:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; need a positive multiple of 16, the block "
                    "of NVFP4"
                )
        if min(self.layers, self.key_value_heads) < 1 or self.heads % self.key_value_heads:
            raise ValueError(
                f"{self.layers} layers, {self.heads} heads and {self.key_value_heads} key-value "
                "heads; need at least one each, and heads a multiple of key-value heads"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embeddings need an even one")


def model_config(sizes: Sizes) -> Qwen3Config:
    """The configuration that goes into config.json."""
    ids = tokenizer.IDS
    return Qwen3Config(
        vocab_size=tokenizer.VOCABULARY_SIZE,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_value_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=ids[tokenizer.BEGIN],
        eos_token_id=ids[tokenizer.END],
        pad_token_id=ids[tokenizer.PAD],
    )


def new_model(sizes: Sizes, seed: int) -> Qwen3ForCausalLM:
    """An untrained model, float32; the same weights for the same seed."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(model_config(sizes))
    # As deep networks want it: what is added to the residual stream starts small.
    scale = (2 * sizes.layers) ** -0.5
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(scale)
            layer.mlp.down_proj.weight.mul_(scale)
    return model


def parameter_count(model: torch.nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def save_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write a folder that transformers, vLLM and reset-quantize take: bfloat16, with tokenizer.

    Sampling defaults are left out of generation_config.json: the temperature is what is studied.

    Raises:
        ValueError: the weights would exceed `LARGEST_BYTES`.
        OSError: the folder cannot be written to.
    """
    needed = 2 * parameter_count(model)
    if needed > LARGEST_BYTES:
        raise ValueError(
            f"the model has {needed / 2**20:.1f} MiB of bfloat16 weights, more than the "
            f"{LARGEST_BYTES // 2**20} MiB that a repository should carry; choose smaller sizes"
        )
    copy: Any = Qwen3ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16)
    copy.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    copy.save_pretrained(folder)
    tokenizer.save_tokenizer(folder)
    licence = Path(__file__).parents[2] / "LICENSE"
    shutil.copyfile(licence, folder / "LICENSE")
