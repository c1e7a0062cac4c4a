"""Qwen3's forward pass in plain torch: over whole texts, and one token for many texts at once.

Both run the modules of a transformers model, so that quantised linear layers take part as they are;
tests hold both to that model's own forward. Knows no sampling and no training.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.pocket_reasoner.attention import attend, new_cells


def text_logits(model: Any, ids: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Logits [B, T, V] of whole texts.

    Args:
        model: a Qwen3ForCausalLM of transformers.
        ids: [B, T]; every row is one text from position 0.
        tables: `rotary_tables` for length T.
    """
    cos, sin = (table.unsqueeze(1) for table in tables)  # [T, 1, d]
    x = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        attention = layer.self_attn
        q, k, v = _heads(attention, layer.input_layernorm(x))  # [B, T, heads, d]
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        groups = q.shape[1] // k.shape[1]
        k, v = (one.repeat_interleave(groups, dim=1) for one in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attention.o_proj(y.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    logits: Tensor = model.lm_head(model.model.norm(x))
    return logits


class StepCache:
    """Keys and values of `rows` texts of up to `length` tokens, at addresses that do not change.

    Memory: 2 x layers x rows x length x key-value heads x head_dim numbers of the model's dtype.
    """

    def __init__(self, model: Any, rows: int, length: int) -> None:
        config = model.config
        heads, d = config.num_key_value_heads, config.head_dim
        weight = model.model.embed_tokens.weight
        layers = range(config.num_hidden_layers)
        cells = [new_cells(weight, rows, heads, d, length) for _ in layers]
        self.keys, self.values = zip(*cells, strict=True)  # as `attend` takes them
        self.cos, self.sin = rotary_tables(model, length, weight.dtype)  # [L, d]
        self.rows = torch.arange(rows, device=weight.device)


def step_logits(model: Any, cache: StepCache, token: Tensor, position: Tensor) -> Tensor:
    """Logits [B, V] after one more token in every row.

    Each row has its own position and sees its own cells 0 .. position alone: whatever older texts
    left behind them is not looked at. Waits for nothing, so that a CUDA graph can hold it.

    Args:
        model: a Qwen3ForCausalLM of transformers, in eval mode.
        cache: of as many rows; takes the token in.
        token: [B] int64.
        position: [B] int64, place of the token in its text, below the length of the cache.
    """
    cos, sin = cache.cos[position].unsqueeze(1), cache.sin[position].unsqueeze(1)  # [B, 1, d]
    x = model.model.embed_tokens(token)  # [B, hidden]
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        q, k, v = _heads(attention, layer.input_layernorm(x))  # [B, heads, d]
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        keys, values = cache.keys[number], cache.values[number]
        keys[cache.rows, :, :, position] = k
        values[cache.rows, :, position] = v
        y = attend(q, keys, values, position, attention.scaling)  # [B, heads, d]
        x = x + attention.o_proj(y.flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    logits: Tensor = model.lm_head(model.model.norm(x))
    return logits


def rotary_tables(model: Any, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim] of the model's own rotary embedding."""
    device = model.model.embed_tokens.weight.device
    positions = torch.arange(length, device=device).unsqueeze(0)
    cos, sin = model.model.rotary_emb(torch.empty(0, dtype=dtype, device=device), positions)
    return cos[0], sin[0]


def _heads(attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [..., heads, d]; the first two normalised."""
    shape = (-1, attention.head_dim)
    q = attention.q_norm(attention.q_proj(x).unflatten(-1, shape))
    k = attention.k_norm(attention.k_proj(x).unflatten(-1, shape))
    return q, k, attention.v_proj(x).unflatten(-1, shape)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., heads, d]; the tables have 1 for heads."""
    one, two = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-two, one], dim=-1) * sin
