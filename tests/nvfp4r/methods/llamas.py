"""Two-layer models as source folders, and what enters and leaves their layers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nvfp4r.selection import ConversionPlan, plan_conversion

VOCAB = 96
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),  # q, k and v have a bias
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),  # norms behind q and k
    "gemma": (GemmaConfig, GemmaForCausalLM),  # norms multiply by 1 + weight
}


def saved_model(
    folder: Path, kind: str = "llama", *, kv_heads: int = 4, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A model of four heads with a few loud channels in every norm, in eval mode, and its folder.

    The loud channels are what methods with scales are for.
    """
    config_class, model_class = KINDS[kind]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=16,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    model = model_class(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.1 * torch.randn_like(parameter)
            if name.endswith("layernorm.weight"):
                parameter[::9] *= 20
    model.save_pretrained(folder)
    # Not .float(), which would leave the rotary frequencies rounded.
    return model_class.from_pretrained(folder, dtype=torch.float32).eval()


def plan_of(folder: Path, *exclude: str) -> ConversionPlan:
    return plan_conversion(folder, exclude)


def token_rows(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


def layer_inputs(model: PreTrainedModel, rows: list[Tensor]) -> dict[str, Tensor]:
    """[tokens, K] float32 by linear layer: what enters it when every row runs alone."""
    seen: dict[str, list[Tensor]] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":

            def record(_, args, name=name):
                seen.setdefault(name, []).append(args[0].detach().flatten(0, -2))

            handles.append(module.register_forward_pre_hook(record))
    with torch.no_grad():
        for row in rows:
            model(input_ids=row.unsqueeze(0), use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


def logits(model: PreTrainedModel, row: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=row.unsqueeze(0), use_cache=False).logits[0].double()
