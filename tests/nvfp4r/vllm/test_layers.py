"""vLLM's own layers, built and loaded as its models do it, on this project's method.

Needs no engine, and so runs with the Python part of any known vLLM.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="the package vllm is not installed; see make test-vllm")

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from nvfp4r import NVFP4Tensor, quantize
from nvfp4r.checkpoint.dialects import TENSOR_NAMES
from nvfp4r.vllm.methods import NVFP4RLinearMethod
from tests.nvfp4r.vllm.test_configs import make_config

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("one_rank")]

DIALECTS = ("modelopt", "compressed-tensors")
HIDDEN, INPUT_SCALE = 64, 2.0**-7


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.delenv("NVFP4R_GEMV_MAX_M", raising=False)
    monkeypatch.setenv("NVFP4R", "1")
    monkeypatch.setenv("NVFP4R_ACTIVATIONS", "none")


def weight(rows: int, columns: int, seed: int) -> NVFP4Tensor:
    """A random matrix; its global scale depends on `seed`."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor(2.0 ** (seed - 8))
    return quantize(torch.randn(rows, columns, generator=generator), global_scale=scale)


def stored(tensor: NVFP4Tensor, dialect: str) -> dict[str, Tensor]:
    """What a checkpoint holds of a matrix, by suffix."""
    names = TENSOR_NAMES[dialect]

    def scalar(value: Tensor) -> Tensor:
        value = 1 / value if names.stores_divisors else value
        return value.reshape(names.scalar_shape)

    return {
        names.codes: tensor.codes,
        names.block_scale: tensor.block_scale,
        names.global_scale: scalar(tensor.global_scale),
        names.input_scale: scalar(torch.tensor(INPUT_SCALE)),
    }


def load(layer: nn.Module, tensor: NVFP4Tensor, dialect: str, shard=None) -> None:
    parameters = dict(layer.named_parameters())
    for suffix, value in stored(tensor, dialect).items():
        parameter = parameters[suffix]
        shards = () if shard is None else (shard,)
        parameter.weight_loader(parameter, value, *shards)


def check(layer: nn.Module, weights: list[NVFP4Tensor]) -> None:
    """The layer computes with each part as it is stored; one rounding to bfloat16."""
    assert type(layer.quant_method) is NVFP4RLinearMethod
    layer.quant_method.process_weights_after_loading(layer)
    matrix = torch.cat([w.dequantize(torch.float32) for w in weights]).double()
    for M in (1, 9):
        x = torch.randn(M, matrix.shape[1], generator=torch.Generator().manual_seed(M)).bfloat16()
        y = layer.quant_method.apply(layer, x)
        expected = x.double() @ matrix.T
        error = (y[:, : matrix.shape[0]].double() - expected).norm() / expected.norm()
        assert error < torch.finfo(torch.bfloat16).eps / 2
        assert not y[:, matrix.shape[0] :].any()  # padding


@pytest.fixture
def config(dialect):
    return make_config(dialect, "nvfp4", exclude=())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a2_q_k_v_keep_their_scales(config, dialect):
    layer = QKVParallelLinear(
        *(HIDDEN, 16, 4, 2),
        bias=False,
        params_dtype=torch.bfloat16,
        quant_config=config,
        prefix="model.layers.0.self_attn.qkv_proj",
    )
    weights = [weight(rows, HIDDEN, seed) for seed, rows in enumerate((64, 32, 32))]
    for shard, tensor in zip("qkv", weights, strict=True):
        load(layer, tensor, dialect, shard)
    check(layer, weights)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a2_gate_and_up_keep_their_scales(config, dialect):
    layer = MergedColumnParallelLinear(
        HIDDEN,
        [80, 80],
        bias=False,
        params_dtype=torch.bfloat16,
        quant_config=config,
        prefix="model.layers.0.mlp.gate_up_proj",
    )
    weights = [weight(80, HIDDEN, seed) for seed in (1, 4)]
    for shard, tensor in enumerate(weights):
        load(layer, tensor, dialect, shard)
    check(layer, weights)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a3_a_layer_that_is_stored_fused_has_one_scale(config, dialect):
    layer = MergedColumnParallelLinear(
        HIDDEN,
        [80, 80],
        bias=False,
        params_dtype=torch.bfloat16,
        quant_config=config,
        prefix="model.layers.0.mlp.gate_up_proj",
    )
    whole = weight(160, HIDDEN, 3)
    load(layer, whole, dialect)
    check(layer, [whole])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_row_parallel_layer(config, dialect):
    layer = RowParallelLinear(
        80,
        HIDDEN,
        bias=False,
        params_dtype=torch.bfloat16,
        quant_config=config,
        prefix="model.layers.0.mlp.down_proj",
    )
    tensor = weight(HIDDEN, 80, 2)
    load(layer, tensor, dialect)
    check(layer, [tensor])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_quantised_head_with_padded_rows(config, dialect):
    layer = ParallelLMHead(
        100, HIDDEN, params_dtype=torch.bfloat16, quant_config=config, prefix="lm_head"
    )
    tensor = weight(100, HIDDEN, 5)
    load(layer, tensor, dialect)
    check(layer, [tensor])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a4_a_scale_that_the_checkpoint_does_not_hold_is_named(config, dialect):
    layer = QKVParallelLinear(
        *(HIDDEN, 16, 4, 2),
        bias=False,
        params_dtype=torch.bfloat16,
        quant_config=config,
        prefix="model.layers.3.self_attn.qkv_proj",
    )
    for shard, rows in (("q", 64), ("k", 32)):
        load(layer, weight(rows, HIDDEN, 0), dialect, shard)
    name = f"model.layers.3.self_attn.v_proj.{TENSOR_NAMES[dialect].global_scale}"
    with pytest.raises(ValueError, match=f"global_scale missing for {name};"):
        layer.quant_method.process_weights_after_loading(layer)
