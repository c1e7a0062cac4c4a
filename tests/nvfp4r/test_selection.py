"""What of a model is quantised, what stays, and what is refused before any weight is read."""

from __future__ import annotations

import json

import pytest
import torch

from nvfp4r.selection import plan_conversion
from tests.nvfp4r.sources import CONFIG, LINEARS, llama_tensors, write_source

LAYERS = [f"model.layers.{i}." for i in range(2)]


def matrix(N: int = 32, K: int = 32, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(N, K).to(dtype)


@pytest.mark.parametrize("tied", [False, True])
def test_linear_layers_are_quantised_and_the_rest_stays(tmp_path, tied):
    plan = plan_conversion(write_source(tmp_path / "m", llama_tensors(tied=tied)))
    assert set(plan.quantised) == {layer + name for layer in LAYERS for name in LINEARS}
    reasons = {
        "model.embed_tokens.weight": "embedding",
        "model.layers.0.input_layernorm.weight": "norm, bias or other vector",
        "model.layers.0.self_attn.q_proj.bias": "norm, bias or other vector",
    }
    assert reasons.items() <= plan.kept.items()
    assert plan.kept.get("lm_head.weight") == (None if tied else "output head")
    # Engines quantise a head that is not listed, also one that is tied and has no tensor.
    assert plan.exclude == ("lm_head",)


def test_groups_are_those_that_engines_fuse(tmp_path):
    plan = plan_conversion(write_source(tmp_path / "m", llama_tensors()))
    assert set(plan.groups) == {
        group
        for layer in LAYERS
        for group in (
            tuple(f"{layer}self_attn.{x}_proj" for x in "qkv"),
            tuple(f"{layer}mlp.{x}_proj" for x in ("gate", "up")),
        )
    }


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("model.layers.0.mlp.gate.weight", (4, 32), "router"),
        ("model.layers.0.block_sparse_moe.router.layer.weight", (4, 32), "router"),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 32), "router"),
        ("model.layers.0.mixer.conv1d.weight", (64, 1, 4), "not a linear weight"),
        ("model.layers.0.mixer.A_log", (32, 16), "not a linear weight"),
        ("visual.patch.proj.weight", (32, 3, 2, 14, 14), "not a linear weight"),
        ("transformer.wte.weight", (64, 32), "embedding"),
        ("output_layer.weight", (64, 32), "output head"),
    ],
)
def test_what_stays_and_why(tmp_path, name, shape, reason):
    tensors = llama_tensors() | {name: torch.ones(shape).bfloat16()}
    plan = plan_conversion(write_source(tmp_path / "m", tensors))
    assert plan.kept[name] == reason
    is_listed = name.removesuffix(".weight") in plan.exclude
    assert is_listed == (reason in ("router", "output head"))


def test_every_expert_of_its_own_is_quantised(tmp_path):
    experts = {
        f"model.layers.0.mlp.experts.{i}.{x}.weight": matrix() for i in (0, 1) for x in ("w1", "w3")
    }
    plan = plan_conversion(write_source(tmp_path / "m", llama_tensors() | experts))
    assert {name.removesuffix(".weight") for name in experts} <= set(plan.quantised)
    assert ("model.layers.0.mlp.experts.1.w1", "model.layers.0.mlp.experts.1.w3") in plan.groups


def test_sizes_are_those_of_the_files(tmp_path):
    tensors = llama_tensors()
    plan = plan_conversion(write_source(tmp_path / "m", tensors))
    assert plan.source_bytes == sum(tensor.nbytes for tensor in tensors.values())
    quantised = sum(plan.quantised[name].nbytes for name in plan.quantised)
    # 16 bits become 4 + 8/16, and a float32 scale
    assert plan.output_bytes == plan.source_bytes - quantised + quantised * 9 // 32 + 4 * 14


@pytest.mark.parametrize(
    ("pattern", "excluded"),
    [
        ("*.down_proj", [f"{layer}mlp.down_proj" for layer in LAYERS]),
        ("model.layers.1.self_attn.o_proj", ["model.layers.1.self_attn.o_proj"]),
        ("re:.*layers\\.0\\.mlp", [f"model.layers.0.mlp.{x}_proj" for x in ("gate", "up", "down")]),
        ("*.qkv_proj", [f"{layer}self_attn.{x}_proj" for layer in LAYERS for x in "qkv"]),
        ("lm_head", []),
    ],
)
def test_exclusions_are_written_as_exact_names(tmp_path, pattern, excluded):
    plan = plan_conversion(write_source(tmp_path / "m", llama_tensors()), [pattern])
    assert set(plan.exclude) == {*excluded, "lm_head"}
    assert not set(excluded) & set(plan.quantised)
    assert len(plan.quantised) == 14 - len(excluded)
    assert all(plan.kept[f"{name}.weight"] == "excluded" for name in excluded)


def test_a_tied_head_may_be_excluded_though_it_has_no_tensor(tmp_path):
    source = write_source(tmp_path / "m", llama_tensors(tied=True))
    assert plan_conversion(source, ["lm_head"]).exclude == ("lm_head",)


def test_stacked_experts_may_be_excluded(tmp_path):
    tensors = llama_tensors() | {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(4, 32, 96)}
    plan = plan_conversion(write_source(tmp_path / "m", tensors), ["*experts*"])
    assert plan.exclude == ("lm_head", "model.layers.0.mlp.experts")
    assert plan.kept["model.layers.0.mlp.experts.gate_up_proj"] == "excluded"


@pytest.mark.parametrize(
    ("tensors", "exclude", "message"),
    [
        (
            {"model.layers.0.mlp.odd_proj.weight": matrix(K=40)},
            [],
            r"odd_proj: K=40, need a multiple of 16; .*--exclude 'model.layers.0.mlp.odd_proj'",
        ),
        (
            {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(4, 32, 96)},
            [],
            r"experts.gate_up_proj has shape \[4, 32, 96\].*--exclude '\*experts\*'",
        ),
        ({}, ["*.dwon_proj"], r"exclusion pattern '\*\.dwon_proj' covers none of the \d+ modules"),
        (
            {},
            ["*.q_proj"],
            r"covers model.layers.0.self_attn.q_proj but not model.layers.0.self_attn.k_proj",
        ),
        ({}, ["re:("], r"'re:\(' is not a valid regular expression"),
        ({}, ["model.layers"], r"nothing to quantise among \d+ tensors.*--exclude"),
        (
            {"model.layers.0.mlp.up_proj.weight": matrix(48, 32, torch.float8_e4m3fn)},
            [],
            r"up_proj.weight is F8_E4M3 \[48, 32\], so the model is quantised already",
        ),
        (
            {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)},
            [],
            r"up_proj.weight_scale_inv is F32 \[1\], so the model is quantised already",
        ),
        (
            {"model.layers.0.mlp.up_proj.weight": matrix(48, 32, torch.float64)},
            [],
            r"up_proj.weight is F64 \[48, 32\], need a matrix in BF16, F16, F32",
        ),
    ],
)
def test_refusals_name_the_layer_or_the_pattern(tmp_path, tensors, exclude, message):
    source = write_source(tmp_path / "m", llama_tensors() | tensors)
    with pytest.raises(ValueError, match=message):
        plan_conversion(source, exclude)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "config.json",
            {**CONFIG, "quantization_config": {"quant_method": "fp8"}},
            r"config.json: quantization_config says .* quantised already \(fp8\)",
        ),
        (
            "config.json",
            {**CONFIG, "compression_config": {"quant_method": "compressed-tensors"}},
            r"config.json: compression_config says .* quantised already",
        ),
        # A10: some exports say so in this file alone.
        ("hf_quant_config.json", {}, r"hf_quant_config.json: says .* quantised already"),
    ],
)
def test_a_quantised_model_is_refused(tmp_path, file, content, message):
    source = write_source(tmp_path / "m", llama_tensors())
    (source / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        plan_conversion(source)


def test_unreadable_config_and_files_are_named(tmp_path):
    source = write_source(tmp_path / "m", llama_tensors())
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors: cannot be read .*truncated"):
        plan_conversion(source)
    file.unlink()
    with pytest.raises(ValueError, match=r"need model\.safetensors"):
        plan_conversion(source)
    (source / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: cannot be read as JSON"):
        plan_conversion(source)
