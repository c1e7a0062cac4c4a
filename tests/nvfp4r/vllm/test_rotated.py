"""Rotated layers in vLLM's configs and layers: what runs, what is refused; and the library's word.

Needs no engine.
"""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("vllm", reason="the package vllm is not installed; see make test-vllm")

import torch
from compressed_tensors.transform import TransformConfig, apply_transform_config
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from nvfp4r import NVFP4Tensor
from nvfp4r.checkpoint.dialects import config_block
from nvfp4r.vllm import configs
from nvfp4r.vllm.methods import NVFP4RLinearMethod
from nvfp4r.vllm.record import LayerShape, record
from tests.nvfp4r.rotated_truth import HADAMARD, assert_rotated, grid, turn
from tests.nvfp4r.test_transforms import QUIP, changed, scoped, toy
from tests.nvfp4r.vllm.test_configs import bare, make_config, method_of
from tests.nvfp4r.vllm.test_layers import HIDDEN, INPUT_SCALE, load, weight

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("one_rank")]

CT = "compressed-tensors"
ROTATED = config_block(CT, "nvfp4", [], {}, "hadamard16")["transform_config"]
UP = "model.layers.0.mlp.gate_up_proj"


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    record.cache_clear()
    monkeypatch.delenv("NVFP4R_GEMV_MAX_M", raising=False)
    monkeypatch.setenv("NVFP4R", "1")
    monkeypatch.setenv("NVFP4R_ACTIVATIONS", "none")


def rotated_config(transform=ROTATED, **options):
    return make_config(CT, exclude=options.pop("exclude", ()), transform_config=transform)


# --- layers


def check(layer: nn.Module, weights: list[NVFP4Tensor], activations: str) -> None:
    """Against float64; scales are powers of two, so that a fused weight has one truth."""
    assert type(layer.quant_method) is NVFP4RLinearMethod
    layer.quant_method.process_weights_after_loading(layer)
    rows = sum(w.shape[0] for w in weights)
    scale = torch.tensor(INPUT_SCALE) if activations == "nvfp4" else None
    for M in (1, 9, 70):
        x = grid(M, weights[0].shape[1], dtype=torch.bfloat16, seed=M)
        y = layer.quant_method.apply(layer, x)
        assert_rotated(y[:, :rows], x, NVFP4Tensor.fuse(weights), None, scale)
        assert not y[:, rows:].any()  # padding
    assert record().layers[layer].shape.rotation == "hadamard16"
    assert {shape.rotation for shape, _ in record().counts} == {"hadamard16"}


def load_matrix(layer: nn.Module, group: str, matrix=HADAMARD.sign(), shard=None) -> None:
    parameter = dict(layer.named_parameters())[f"{group}_input.weight"]
    parameter.weight_loader(parameter, matrix.bfloat16(), *(() if shard is None else (shard,)))


@pytest.mark.parametrize("activations", ["none", "nvfp4"])
@pytest.mark.parametrize("transform", [ROTATED, QUIP], ids=["ours", "llm-compressor"])
@pytest.mark.parametrize("stored", [True, False], ids=["matrices", "no_matrices"])
def test_q_k_v_are_rotated_once(monkeypatch, transform, activations, stored):
    monkeypatch.setenv("NVFP4R_ACTIVATIONS", activations)
    layer = QKVParallelLinear(
        *(HIDDEN, 16, 4, 2),
        bias=False,
        params_dtype=torch.bfloat16,
        quant_config=rotated_config(transform),
        prefix="model.layers.0.self_attn.qkv_proj",
    )
    (group,) = transform["config_groups"]
    weights = [weight(rows, HIDDEN, seed) for seed, rows in enumerate((64, 32, 32))]
    for shard, tensor in zip("qkv", weights, strict=True):
        load(layer, tensor, CT, shard)
        if stored:
            load_matrix(layer, group, shard=shard)
    check(layer, weights, activations)


@pytest.mark.parametrize("kind", ["gate_up", "down", "head"])
def test_other_layers_are_rotated_too(kind):
    options = {"params_dtype": torch.bfloat16, "quant_config": rotated_config()}
    if kind == "gate_up":
        layer = MergedColumnParallelLinear(HIDDEN, [80, 80], bias=False, prefix=UP, **options)
        weights = [weight(80, HIDDEN, seed) for seed in (1, 4)]
        for shard, tensor in enumerate(weights):
            load(layer, tensor, CT, shard)
            load_matrix(layer, "hadamard16", shard=shard)
    elif kind == "down":
        name = "model.layers.0.mlp.down_proj"
        layer = RowParallelLinear(80, HIDDEN, bias=False, prefix=name, **options)
        weights = [weight(HIDDEN, 80, 2)]
        load(layer, weights[0], CT)
    else:
        layer = ParallelLMHead(100, HIDDEN, prefix="lm_head", **options)
        weights = [weight(100, HIDDEN, 5)]
        load(layer, weights[0], CT)
        load_matrix(layer, "hadamard16")
    check(layer, weights, "none")


@pytest.mark.parametrize("matrix", [-HADAMARD.sign(), HADAMARD, torch.ones(8, 8)])
def test_another_matrix_is_refused_when_it_is_loaded(matrix):
    name = "model.layers.0.mlp.down_proj"
    options = {"params_dtype": torch.bfloat16, "quant_config": rotated_config()}
    layer = RowParallelLinear(80, HIDDEN, bias=False, prefix=name, **options)
    with pytest.raises(ValueError, match=f"{name}: the matrix stored .* is not the Hadamard"):
        load_matrix(layer, "hadamard16", matrix)


def test_what_is_compiled_holds_one_call_and_depends_on_the_rotation():
    hashes = []
    for transform in (None, ROTATED):
        config = VllmConfig()
        with set_current_vllm_config(config):
            method = method_of(rotated_config(transform))
        hashes.append(config.compute_hash())
    assert method.kernel.rotation == "hadamard16"
    assert hashes[0] != hashes[1]


# --- refusals


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (changed("head_dim", 128), "head_dim is 128, need 16"),
        (changed("type", "random-hadamard"), "type is 'random-hadamard', need 'hadamard'"),
        (changed("randomize", True), "randomize is True"),
        (
            scoped(ignore=["re:.*up_proj"]),
            r"model\.layers\.0\.mlp\.up_proj: is quantised, but the transform v",
        ),
    ],
)
def test_layers_that_would_need_another_rotation_are_refused(monkeypatch, transform, message):
    with pytest.raises(ValueError, match=message):
        method_of(rotated_config(transform))
    stock = configs.CompressedTensorsConfig
    monkeypatch.setattr(stock, "get_quant_method", lambda self, layer, prefix: "vLLM's own")
    monkeypatch.setenv("NVFP4R", "0")
    assert method_of(rotated_config(transform)) == "vLLM's own"


def test_a_local_checkpoint_of_another_rotation_is_refused_before_it_is_loaded(tmp_path):
    folder = toy(tmp_path, changed("head_dim", 32))
    with pytest.raises(ValueError, match=r"config\.json: transform_config.*head_dim is 32"):
        rotated_config(exclude=["lm_head"]).maybe_update_config(str(folder))


def left_to_vllm(monkeypatch, method) -> None:
    """vLLM's own choice is cut out, and this project's layers are declined."""
    stock = configs.CompressedTensorsConfig
    monkeypatch.setattr(stock, "get_quant_method", lambda self, layer, prefix: method)
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "NVFP4RLinearKernel")


def test_what_vllm_would_run_unrotated_is_refused(monkeypatch):
    """It rotates in linear layers alone."""
    left_to_vllm(monkeypatch, None)
    for exclude in ((), ("lm_head",)):  # a quantised head, and a plain one that is rotated
        config = rotated_config(scoped(ignore=[]), exclude=exclude)
        with pytest.raises(ValueError, match="lm_head: the transform v of transform_config covers"):
            method_of(config, "lm_head", bare(ParallelLMHead))
    ignored = rotated_config(QUIP, exclude=["lm_head"])
    assert method_of(ignored, "lm_head", bare(ParallelLMHead)) is None
    kind = configs.CompressedTensorsMoEMethod
    monkeypatch.setattr(kind, "__abstractmethods__", frozenset())
    experts = kind.__new__(kind)
    left_to_vllm(monkeypatch, experts)
    name = "model.layers.0.mlp.experts"
    with pytest.raises(ValueError, match=f"{name}: the transform v of transform_config covers it"):
        method_of(rotated_config(QUIP), name, nn.Module())
    assert method_of(rotated_config(None), name, nn.Module()) is experts


def test_linear_layers_that_are_declined_are_rotated_by_vllm(monkeypatch, caplog):
    left_to_vllm(monkeypatch, "vLLM's own")
    assert method_of(rotated_config(), UP, bare(LinearBase)) == "vLLM's own"
    assert "VLLM_DISABLED_KERNELS names" in caplog.text


# --- what others make of our configuration


def test_the_library_reads_our_transform_as_the_same_rotation():
    """Its own code, on an ordinary model: rotated weights, and inputs rotated by a hook."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for name, sizes in (("up_proj", (64, 48)), ("lm_head", (48, 32))):
        model.add_module(name, nn.Linear(*sizes, bias=False))
    before = copy.deepcopy(model)
    block = config_block(CT, "none", ["lm_head"], {}, "hadamard16")["transform_config"]
    apply_transform_config(model, TransformConfig.model_validate(block))
    turned = turn(before.up_proj.weight)
    assert torch.allclose(model.up_proj.weight.double(), turned, rtol=0, atol=2.0**-24)
    assert torch.equal(model.lm_head.weight, before.lm_head.weight)
    seen = []
    model.up_proj.register_forward_hook(lambda layer, inputs, y: seen.append(inputs[0]))
    x = grid(5, 64, dtype=torch.float32)
    model(x)
    assert torch.equal(seen[0].double(), turn(x))
    names = {n for n, _ in model.named_parameters()}
    assert names == {"up_proj.weight", "up_proj.hadamard16_input.weight", "lm_head.weight"}
    assert torch.equal(model.up_proj.hadamard16_input.weight.double() / 4, HADAMARD)


def test_the_shape_of_a_layer_tells_its_rotation():
    plain = LayerShape(16, 16, "bf16", False, 64)
    assert plain.rotation is None
    assert plain != LayerShape(16, 16, "bf16", False, 64, "hadamard16")
