"""Damaged and contradictory checkpoints: every one is refused by name, and listed."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from nvfp4r.checkpoint import load_checkpoint
from tests.nvfp4r.toy import expect_refusal, write_toy

UP = "model.layers.1.mlp.up_proj"
DIALECTS = ["modelopt", "compressed-tensors"]
SUFFIXES = {
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors": (
        "weight_packed",
        "weight_scale",
        "weight_global_scale",
        "input_global_scale",
    ),
}


def replace(name, change):
    """An edit that puts `change(old tensor)` in the place of one tensor."""
    return lambda tensors: tensors.update({name: change(tensors[name])})


@pytest.mark.parametrize(
    ("activations", "part"), [("nvfp4", 1), ("nvfp4", 2), ("nvfp4", 3), ("none", 1), ("none", 2)]
)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a4_one_missing_scale_is_named(tmp_path, dialect, activations, part):
    key = f"{UP}.{SUFFIXES[dialect][part]}"
    toy = write_toy(tmp_path / "toy", dialect, activations, edit=lambda t: t.pop(key))
    lines = expect_refusal(toy.folder, r"model\.safetensors", re.escape(key) + " is missing")
    assert len(lines) == 1


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a4_in_a_sharded_checkpoint_the_file_is_named(tmp_path, dialect):
    key = f"{UP}.{SUFFIXES[dialect][3]}"
    toy = write_toy(tmp_path / "toy", dialect, shards=4, edit=lambda t: t.pop(key))
    index = json.loads((toy.folder / "model.safetensors.index.json").read_text())
    file = index["weight_map"][f"{UP}.{SUFFIXES[dialect][0]}"]
    expect_refusal(toy.folder, re.escape(file), re.escape(key))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_several_missing_scales_are_all_listed(tmp_path, dialect):
    keys = [f"model.layers.{i}.mlp.up_proj.{SUFFIXES[dialect][3]}" for i in (0, 1)]
    toy = write_toy(tmp_path / "toy", dialect, edit=lambda t: [t.pop(key) for key in keys])
    lines = expect_refusal(toy.folder, re.escape(keys[0]))
    assert [key for key in keys if any(key in line for line in lines)] == keys
    with pytest.raises(ValueError, match=r"\(1 more: `nvfp4r inspect .*` lists them\)"):
        load_checkpoint(toy.folder)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (0, lambda t: t[:, :-3], r"K=26, need a multiple of 16"),
        (0, lambda t: t.reshape(2, 24, 16), r"is U8 \[2, 24, 16\], need U8 \[N, K/2\],"),
        (0, lambda t: t[:0], r"is U8 \[0, 16\], need U8"),
        (1, lambda t: t[:, :1], r"F8_E4M3 \[48, 1\], need .*group size 32.*group size 16"),
        (1, lambda t: t[:-1], r"F8_E4M3 \[47, 2\], need F8_E4M3 \[48, 2\]"),
        (1, lambda t: t.reshape(-1), r"F8_E4M3 \[96\], need F8_E4M3 \[48, 2\]"),
        (1, lambda t: t.view(torch.uint8), r"U8 \[48, 2\], need F8_E4M3"),
        (1, lambda t: t.float(), r"F32 \[48, 2\], need F8_E4M3"),
        (2, lambda t: t.reshape(1, 1), r"F32 \[1, 1\], need one F32 value"),
        (2, lambda t: t.expand(48).clone(), r"F32 \[48\], need one F32 value"),
        (2, lambda t: t.bfloat16(), r"is BF16 \[1?\], need one F32 value"),
        (3, lambda t: t.expand(2).clone(), r"F32 \[2\], need one F32 value"),
        (3, lambda t: t.double(), r"is F64 \[1?\], need one F32 value"),
    ],
)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_wrong_shape_or_dtype(tmp_path, dialect, part, change, message):
    key = f"{UP}.{SUFFIXES[dialect][part]}"
    toy = write_toy(tmp_path / "toy", dialect, edit=replace(key, lambda t: change(t).contiguous()))
    expect_refusal(toy.folder, r"model\.safetensors: " + re.escape(key), message)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", [2, 3])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_bad_global_and_input_scales(tmp_path, dialect, part, value):
    key = f"{UP}.{SUFFIXES[dialect][part]}"
    toy = write_toy(
        tmp_path / "toy", dialect, edit=replace(key, lambda t: torch.full_like(t, value))
    )
    kind = "multiplier" if dialect == "modelopt" else "divisor"
    lines = expect_refusal(toy.folder, f"{re.escape(key)} is {value}, need a finite {kind} > 0")
    assert len(lines) == 1


def test_a_divisor_without_a_finite_reciprocal(tmp_path):
    key = f"{UP}.weight_global_scale"
    toy = write_toy(
        tmp_path / "toy",
        "compressed-tensors",
        edit=replace(key, lambda t: torch.full_like(t, 1e-40)),
    )
    expect_refusal(toy.folder, re.escape(key), "finite reciprocal")


def with_byte(value):
    def change(scale):
        scale = scale.view(torch.uint8).clone()
        scale[3, 1] = value
        return scale.view(torch.float8_e4m3fn)

    return change


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0x7F, "1 of 96 NaN block scales"),
        (0xFF, "1 of 96 NaN block scales"),
        (0x81, "1 of 96 negative block scales"),
        (0x00, "1 of 96 zero block scales over non-zero codes"),
    ],
)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_bad_block_scales_are_found_when_they_are_read(tmp_path, dialect, value, message):
    edit = replace(f"{UP}.weight_scale", with_byte(value))
    toy = write_toy(tmp_path / "toy", dialect, edit=edit)
    checkpoint = load_checkpoint(toy.folder)
    full = rf"model\.safetensors: {re.escape(UP)}\.weight: {message}.*, first at .*\[3, 1\]"
    with pytest.raises(ValueError, match=full):
        checkpoint[f"{UP}.weight"]
    with pytest.raises(ValueError, match=full):
        list(checkpoint.items())
    lines = checkpoint.problems()
    assert len(lines) == 1
    assert re.search(full, lines[0])


def test_nan_in_an_unquantised_tensor_is_listed(tmp_path):
    def damage(tensors):
        tensors["model.norm.weight"][5] = math.nan
        tensors["model.norm.weight"][6] = math.inf

    toy = write_toy(tmp_path / "toy", edit=damage)
    lines = load_checkpoint(toy.folder).problems()
    assert len(lines) == 1
    assert "model.norm.weight holds 2 NaN or infinite values" in lines[0]


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        (["weight_scale"], "lm_head.weight_scale"),
        (["input_scale"], "lm_head.input_scale"),
        (["weight_scale", "weight_scale_2", "input_scale"], "weight_scale_2, lm_head.input_scale"),
    ],
)
@pytest.mark.parametrize("pattern", ["lm_head", "lm_head*", "re:.*lm_head"])
def test_a9_excluded_module_with_scales(tmp_path, extra, parts, pattern):
    shapes = {"weight_scale": torch.ones(64, 2).to(torch.float8_e4m3fn)}
    toy = write_toy(
        tmp_path / "toy",
        edit=lambda t: t.update(
            {f"lm_head.{suffix}": shapes.get(suffix, torch.tensor(1.0)) for suffix in extra}
        ),
        edit_config=lambda config: config["quantization_config"].update(ignore=[pattern]),
    )
    expect_refusal(
        toy.folder, re.escape(parts) + " stored, but the exclusion list of", "covers lm_head"
    )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a9_excluded_module_that_is_quantised(tmp_path, dialect):
    toy = write_toy(
        tmp_path / "toy",
        dialect,
        edit_config=lambda config: config["quantization_config"]["ignore"].append("*.o_proj"),
    )
    lines = expect_refusal(toy.folder, "self_attn.o_proj", "stored, but the exclusion list")
    assert len(lines) == 2  # one per layer


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a8_partial_exclusion_of_a_fused_group(tmp_path, dialect):
    codes, *scales = SUFFIXES[dialect]

    def unquantise_q(tensors):
        for layer in (0, 1):
            module = f"model.layers.{layer}.self_attn.q_proj"
            for suffix in (codes, *scales):
                tensors.pop(f"{module}.{suffix}")
            tensors[f"{module}.weight"] = torch.ones(32, 32, dtype=torch.bfloat16)

    toy = write_toy(
        tmp_path / "toy",
        dialect,
        edit=unquantise_q,
        edit_config=lambda config: config["quantization_config"]["ignore"].append("*.q_proj"),
    )
    lines = expect_refusal(
        toy.folder, r"config\.json: the exclusion list covers", "q_proj", "but not", "k_proj"
    )
    assert len(lines) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_a_layer_that_the_config_calls_quantised(tmp_path, dtype):
    name = "model.layers.0.mlp.router.weight"
    toy = write_toy(tmp_path / "toy", edit=lambda t: t.update({name: torch.ones(8, 32).to(dtype)}))
    expect_refusal(toy.folder, re.escape(name) + " is ", "calls this layer quantised")


@pytest.mark.parametrize(
    ("name", "exclude"),
    [
        ("model.layers.0.mlp.gate.weight", ["lm_head", "*.mlp.gate"]),
        ("transformer.wte.weight", ["lm_head"]),
        ("transformer.wpe.weight", ["lm_head"]),
        ("model.embed_positions.weight", ["lm_head"]),
    ],
)
def test_layers_that_need_not_be_quantised(tmp_path, name, exclude):
    toy = write_toy(
        tmp_path / "toy",
        edit=lambda t: t.update({name: torch.ones(8, 32)}),
        edit_config=lambda config: config["quantization_config"].update(ignore=exclude),
    )
    assert name in load_checkpoint(toy.folder).names()


def test_layers_outside_the_targets_need_not_be_quantised(tmp_path):
    def target(config):
        config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:.*layers.*"]
        config["quantization_config"]["ignore"] = []

    toy = write_toy(tmp_path / "toy", "compressed-tensors", edit_config=target)
    assert "lm_head.weight" in load_checkpoint(toy.folder).names()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_orphan_scales(tmp_path, dialect):
    key = f"{UP}.{SUFFIXES[dialect][0]}"
    toy = write_toy(tmp_path / "toy", dialect, edit=lambda t: t.pop(key))
    lines = expect_refusal(
        toy.folder, re.escape(f"{UP}.weight_scale has no {key} beside it"), "incomplete"
    )
    assert len(lines) == 1


def test_scales_beside_a_bf16_weight(tmp_path):
    edit = replace(f"{UP}.weight", lambda t: torch.ones(48, 32, dtype=torch.bfloat16))
    toy = write_toy(tmp_path / "toy", edit=edit)
    expect_refusal(toy.folder, r"up_proj\.weight is BF16 \[48, 32\], need U8", "has scales")


def test_compressed_scales_beside_a_bf16_weight(tmp_path):
    def unpack(tensors):
        del tensors[f"{UP}.weight_packed"]
        tensors[f"{UP}.weight"] = torch.ones(48, 32, dtype=torch.bfloat16)

    toy = write_toy(tmp_path / "toy", "compressed-tensors", edit=unpack)
    expect_refusal(toy.folder, r"no .*weight_packed .*there is .*up_proj\.weight of dtype BF16\)")


def test_packed_and_plain_weight_together(tmp_path):
    toy = write_toy(
        tmp_path / "toy",
        "compressed-tensors",
        edit=lambda t: t.update({f"{UP}.weight": torch.ones(48, 32)}),
    )
    expect_refusal(toy.folder, "both .*up_proj.weight_packed and .*up_proj.weight stored")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{UP}.pre_quant_scale", torch.ones(32), "changes what the weights of .* mean"),
        (f"{UP}.weight_zero_point", torch.zeros(48, 2), "changes what the weights of .* mean"),
        (
            "model.layers.0.mlp.experts.gate_up_proj",
            torch.zeros(2, 4, 8, dtype=torch.uint8),
            "belongs to no quantised linear layer",
        ),
    ],
)
def test_layouts_that_would_be_read_wrongly(tmp_path, name, tensor, message):
    toy = write_toy(tmp_path / "toy", edit=lambda t: t.update({name: tensor}))
    expect_refusal(toy.folder, re.escape(name), message)


@pytest.mark.parametrize(("stored", "claimed"), [DIALECTS, DIALECTS[::-1]])
def test_tensors_of_the_other_dialect(tmp_path, stored, claimed):
    block = {}
    write_toy(tmp_path / "other", claimed, edit_config=lambda config: block.update(config))
    toy = write_toy(tmp_path / "toy", stored, edit_config=lambda config: config.update(block))
    lines = expect_refusal(toy.folder, f"named as in {stored}, but .*config.json says {claimed}")
    assert len(lines) == 1


def test_a_broken_exclusion_pattern_names_the_file(tmp_path):
    toy = write_toy(
        tmp_path / "toy",
        edit_config=lambda config: config["quantization_config"].update(ignore=["re:*"]),
    )
    with pytest.raises(ValueError, match=r"config\.json: exclusion pattern 're:\*' is not a valid"):
        load_checkpoint(toy.folder)
