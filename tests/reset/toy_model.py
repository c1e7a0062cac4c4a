"""A random two-layer llama and a byte-level tokenizer with newline tokens: no network."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, a few newline merges, and an end token that also pads."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    merges = [("Ċ", "Ċ"), (".", "ĊĊ"), ("Ġ", "a")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def toy_llama(vocab_size: int, seed: int = 0, sharpness: float = 6.0) -> LlamaForCausalLM:
    """Random weights; `sharpness` scales the head so that entropies spread over 0 .. 5 nats."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=vocab_size - 1,
        pad_token_id=vocab_size - 1,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    return model


def save_toy(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Writes model and tokenizer to `folder`."""
    tokenizer = toy_tokenizer()
    toy_llama(len(tokenizer)).to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
