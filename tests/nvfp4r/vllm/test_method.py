"""The linear method alone, as vLLM's loader drives it, against the reference in float64."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="the package vllm is not installed; see make test-vllm")

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization import get_quantization_config

from nvfp4r import NVFP4Tensor, quantize
from nvfp4r.checkpoint.dialects import TENSOR_NAMES
from nvfp4r.quantize import quantize_activations
from nvfp4r.vllm import register
from nvfp4r.vllm.methods import NVFP4RLinearMethod
from nvfp4r.vllm.record import record

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("one_rank")]

DIALECTS = ("modelopt", "compressed-tensors")
MEMBERS = ("q_proj", "k_proj", "v_proj")
NAME = "model.layers.0.self_attn.qkv_proj"
SCALES = (2.0**-7, 2.0**-5, 3 * 2.0**-9)
INPUT_SCALE = 2.0**-6


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    for name in ("NVFP4R_GEMV_MAX_M", "NVFP4R_ACTIVATIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NVFP4R", "1")


def parts(widths, K: int) -> list[NVFP4Tensor]:
    """A matrix per part, each with a global scale of its own."""
    generator = torch.Generator().manual_seed(0)
    return [
        quantize(torch.randn(rows, K, generator=generator), global_scale=torch.tensor(scale))
        for rows, scale in zip(widths, SCALES, strict=False)
    ]


def built(method: NVFP4RLinearMethod, widths, K: int, dtype=torch.bfloat16) -> nn.Module:
    layer = nn.Module()
    method.create_weights(
        layer, K, list(widths), K, sum(widths), dtype, weight_loader=lambda *a: None
    )
    return layer


def load(
    layer: nn.Module,
    weights: list[NVFP4Tensor],
    dialect: str,
    *,
    global_scales: list[float] | None = None,
    input_scales: list[float] | None = None,
) -> None:
    """What the loader writes; scales as multipliers, only as many slots as are given."""
    names = TENSOR_NAMES[dialect]
    getattr(layer, names.codes).data.copy_(torch.cat([w.codes for w in weights]))
    getattr(layer, names.block_scale).data.copy_(torch.cat([w.block_scale for w in weights]))
    if global_scales is None:
        global_scales = [float(w.global_scale) for w in weights]
    for field, values in ((names.global_scale, global_scales), (names.input_scale, input_scales)):
        for slot, value in enumerate(values or []):
            getattr(layer, field).data[slot] = 1 / value if names.stores_divisors else value


def truth(weights: list[NVFP4Tensor], x: Tensor, input_scale: float | None) -> Tensor:
    """float64, each part with its own scale."""
    matrix = torch.cat([w.dequantize(torch.float32) for w in weights]).double()
    if input_scale is not None:
        values, _ = quantize_activations(x, torch.tensor(input_scale))
        x = values.double() * input_scale
    return x.double() @ matrix.T


def tokens(M: int, K: int, dtype=torch.bfloat16) -> Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(M)).to(dtype)


def check(found: Tensor, expected: Tensor) -> None:
    """One rounding to the output dtype, and the float32 sums before it."""
    epsilon = torch.finfo(found.dtype).eps
    error = (found.double() - expected).norm() / expected.norm()
    assert error < epsilon / 2, error


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("widths", "K"), [((24, 8, 8), 48), ((1, 1, 1), 16), ((130, 20, 20), 112), ((64,), 256)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activations", ["none", "nvfp4"])
def test_a2_unequal_global_scales_are_exact_for_any_legal_size(
    monkeypatch, dialect, widths, K, dtype, activations
):
    monkeypatch.setenv("NVFP4R_ACTIVATIONS", activations)
    method = NVFP4RLinearMethod(dialect, "nvfp4", NAME, MEMBERS)
    layer = built(method, widths, K, dtype)
    weights = parts(widths, K)
    load(layer, weights, dialect, input_scales=[INPUT_SCALE] * len(widths))
    method.process_weights_after_loading(layer)
    assert sorted(name for name, _ in layer.named_parameters()) == sorted(
        ["alpha", "weight"] + ["input_global_scale"] * (activations == "nvfp4")
    )  # one copy, and nothing of what was loaded
    for M in (1, 8, 70):
        x = tokens(M, K, dtype)
        scale = INPUT_SCALE if activations == "nvfp4" else None
        check(method.apply(layer, x), truth(weights, x, scale))
    assert record().layers[layer].global_scales == len(widths)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a3_a_tensor_that_was_fused_beforehand_has_a_single_scale(dialect):
    method = NVFP4RLinearMethod(dialect, "none", NAME, MEMBERS)
    layer = built(method, (8, 4, 4), 32)
    whole = quantize(torch.randn(16, 32), global_scale=torch.tensor(0.01))
    load(layer, [whole], dialect)  # slot 0 alone
    method.process_weights_after_loading(layer)
    stored = torch.tensor(1 / 0.01 if dialect == "compressed-tensors" else 0.01)
    scale = 1 / stored if dialect == "compressed-tensors" else stored
    assert torch.equal(layer.alpha, scale.expand(16))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a4_missing_scales_are_named(dialect):
    names = TENSOR_NAMES[dialect]
    method = NVFP4RLinearMethod(dialect, "none", NAME, MEMBERS)
    layer = built(method, (8, 4, 4), 32)
    load(layer, parts((8, 4, 4), 32), dialect, global_scales=[0.5, 0.5])
    with pytest.raises(ValueError, match=f"missing for {NAME[:-8]}v_proj.{names.global_scale};"):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a4_missing_block_scales_are_named(dialect):
    method = NVFP4RLinearMethod(dialect, "none", NAME, MEMBERS)
    layer = built(method, (8, 4, 4), 32)
    names = TENSOR_NAMES[dialect]
    getattr(layer, names.codes).data.zero_()
    getattr(layer, names.global_scale).data.fill_(1.0)
    with pytest.raises(ValueError, match=f"{NAME}.*NaN"):
        method.process_weights_after_loading(layer)


def test_a4_missing_input_scales_matter_only_where_they_are_used(monkeypatch):
    for setting in ("none", "nvfp4"):
        monkeypatch.setenv("NVFP4R_ACTIVATIONS", setting)
        method = NVFP4RLinearMethod("modelopt", "nvfp4", NAME, MEMBERS)
        layer = built(method, (8, 4, 4), 32)
        load(layer, parts((8, 4, 4), 32), "modelopt")
        if setting == "none":
            method.process_weights_after_loading(layer)
            continue
        with pytest.raises(ValueError, match=r"q_proj.input_scale, .*v_proj.input_scale missing"):
            method.process_weights_after_loading(layer)


def test_a5_weights_alone_quantised_give_the_sum_of_the_input():
    method = NVFP4RLinearMethod("modelopt", "none", "o_proj", None)
    layer = built(method, (4,), 64)
    load(layer, [quantize(torch.ones(4, 64))], "modelopt")
    method.process_weights_after_loading(layer)
    x = tokens(1, 64)
    check(method.apply(layer, x), x.double().sum().expand(1, 4))


def test_a11_the_bias_is_added_for_any_number_of_tokens():
    method = NVFP4RLinearMethod("modelopt", "none", NAME, MEMBERS)
    layer = built(method, (8, 4, 4), 32)
    load(layer, parts((8, 4, 4), 32), "modelopt")
    method.process_weights_after_loading(layer)
    bias = torch.arange(1, 17).bfloat16()
    for M in (1, 8, 64, 100):
        y = method.apply(layer, torch.zeros(M, 32).bfloat16(), bias)
        assert torch.equal(y, bias.expand(M, 16))


def test_d6_compiled_code_holds_one_call_for_any_number_of_tokens():
    method = NVFP4RLinearMethod("modelopt", "none", NAME, MEMBERS)
    layer = built(method, (8, 4, 4), 32)
    load(layer, parts((8, 4, 4), 32), "modelopt")
    method.process_weights_after_loading(layer)
    targets = []

    def keep(graph, example):
        targets.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    run = torch.compile(
        lambda x: method.apply(layer, x), backend=keep, fullgraph=True, dynamic=True
    )
    for M in (512, 2, 8):
        assert torch.equal(run(tokens(M, 32)), method.apply(layer, tokens(M, 32)))
    assert targets == [[torch.ops.nvfp4r.vllm_linear]]


def test_a12_what_was_derived_comes_anew_with_a_second_load():
    method = NVFP4RLinearMethod("modelopt", "none", "o_proj", None)
    weights = parts((16,), 32)
    layer = built(method, (16,), 32)
    load(layer, weights, "modelopt")
    method.process_weights_after_loading(layer)
    x = tokens(2, 32)
    before = method.apply(layer, x)
    again = built(method, (16,), 32)
    load(again, weights, "modelopt", global_scales=[2 * SCALES[0]])
    method.process_weights_after_loading(again)
    assert torch.equal(method.apply(again, x), 2 * before)


@pytest.mark.parametrize("K", [8, 24, 40])
def test_a7_k_of_a_rank_that_is_no_multiple_of_16_is_refused(K):
    method = NVFP4RLinearMethod("modelopt", "none", "down_proj", None)
    with pytest.raises(ValueError, match=f"down_proj: K={K} on this rank.*tensor-parallel-size"):
        built(method, (16,), K)


def test_a_dtype_without_kernels_is_refused():
    method = NVFP4RLinearMethod("compressed-tensors", "none", "down_proj", None)
    with pytest.raises(ValueError, match=r"down_proj: the model runs in torch.float32.*--dtype"):
        built(method, (16,), 32, torch.float32)


def test_a_tied_head_is_refused():
    method = NVFP4RLinearMethod("modelopt", "none", "lm_head", None)
    layer = built(method, (16,), 32)
    layer.weight = nn.Parameter(torch.zeros(16, 32).bfloat16())
    with pytest.raises(ValueError, match=r"lm_head: weight is torch.bfloat16.*tied"):
        method.process_weights_after_loading(layer)


def test_registering_twice_changes_nothing():
    register()
    classes = [get_quantization_config(n) for n in ("modelopt_fp4", "compressed-tensors")]
    register()
    assert classes == [get_quantization_config(n) for n in ("modelopt_fp4", "compressed-tensors")]
    assert {found.__module__ for found in classes} == {"nvfp4r.vllm.configs"}
