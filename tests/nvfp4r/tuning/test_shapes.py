"""Shapes to be measured: from flags, and from a checkpoint as engines fuse its layers."""

import pytest
import torch

from nvfp4r.checkpoint import load_checkpoint
from nvfp4r.convert import quantise_checkpoint
from nvfp4r.tuning.shapes import QWEN3_8B, Shape, checkpoint_shapes, parse_shape, parse_tokens
from tests.nvfp4r.sources import write_source

K = 64


def layer(index: int) -> dict[str, torch.Tensor]:
    rows = {
        "self_attn.q_proj": 64,
        "self_attn.k_proj": 32,
        "self_attn.v_proj": 32,
        "self_attn.o_proj": 64,
        "mlp.gate_proj": 96,
        "mlp.up_proj": 96,
        "mlp.extra_proj": 64,
    }
    return {
        f"model.layers.{index}.{name}.weight": torch.randn(N, K).bfloat16()
        for name, N in rows.items()
    }


def test_layers_are_fused_and_named_once(tmp_path):
    tensors = layer(0) | layer(1)
    source = write_source(tmp_path / "source", tensors)
    quantise_checkpoint(source, tmp_path / "out")
    shapes = checkpoint_shapes(load_checkpoint(tmp_path / "out"))
    assert sorted(shapes, key=lambda shape: shape.N) == [
        Shape("mlp.extra_proj, self_attn.o_proj", 64, K),
        Shape("self_attn.{q_proj,k_proj,v_proj}", 128, K),
        Shape("mlp.{gate_proj,up_proj}", 192, K),
    ]


@pytest.mark.parametrize("text", ["", "4096", "4096x", "0x64", "64x0", "64x24", "8X16", "-8x16"])
def test_bad_shapes_are_named(text):
    with pytest.raises(ValueError, match=rf"--shape: got '{text}', need outputs x inputs"):
        parse_shape(text)


def test_shapes_and_tokens_from_flags():
    assert parse_shape("6144x4096") == Shape("given", 6144, 4096)
    assert str(parse_shape("8x16")) == "8x16"
    assert parse_tokens("16,1,8,1") == (1, 8, 16)


@pytest.mark.parametrize("text", ["", "0", "1,", "1;2", "1,0", "a", "-1", "1.5"])
def test_bad_tokens_are_named(text):
    with pytest.raises(ValueError, match=rf"--tokens: got '{text}', need numbers >= 1"):
        parse_tokens(text)


def test_the_default_shapes_are_those_of_the_published_configuration():
    """Hidden 4096, 32 heads and 8 key-value heads of 128, intermediate 12288."""
    hidden, heads, kv_heads, head, intermediate = 4096, 32, 8, 128, 12288
    assert [(shape.N, shape.K) for shape in QWEN3_8B] == [
        ((heads + 2 * kv_heads) * head, hidden),
        (hidden, heads * head),
        (2 * intermediate, hidden),
        (hidden, intermediate),
    ]
