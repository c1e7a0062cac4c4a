"""Fused groups and exclusion patterns, on names alone."""

from __future__ import annotations

import pytest

from nvfp4r.groups import FAMILIES, check_exclusions, fused_groups, matches_any

LAYER = "model.layers.3."
ATTENTION = [LAYER + f"self_attn.{name}_proj" for name in "qkvo"]
MLP = [LAYER + f"mlp.{name}_proj" for name in ("gate", "up", "down")]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.fused[0])
def test_every_spelling_is_found_in_stacking_order(family):
    names = [f"block.{member}" for member in reversed(family.members)]
    assert fused_groups([*names, "block.other"]) == [
        tuple(f"block.{member}" for member in family.members)
    ]


def test_q4_to_q_to_k_to_v_is_one_group():
    names = ["blocks.0.attn.to_q", "blocks.0.attn.to_k", "blocks.0.attn.to_v"]
    assert fused_groups(names) == [tuple(names)]


def test_groups_need_one_parent():
    assert fused_groups(["a.q_proj", "b.k_proj", "c.v_proj"]) == []
    assert fused_groups(["a.w1", "b.w3", "a.w2"]) == []


def test_groups_of_two_layers_stay_apart_and_keep_the_order_of_appearance():
    names = [f"layers.{i}.mlp.{part}_proj" for i in (1, 0) for part in ("up", "gate", "down")]
    assert fused_groups(names) == [
        ("layers.1.mlp.gate_proj", "layers.1.mlp.up_proj"),
        ("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"),
    ]


def test_members_that_are_there_form_a_group():
    assert fused_groups(["cross.k_proj", "cross.v_proj"]) == [("cross.k_proj", "cross.v_proj")]
    assert fused_groups(["alone.v_proj"]) == []


def test_a_name_without_parent():
    assert fused_groups(["gate_proj", "up_proj"]) == [("gate_proj", "up_proj")]


@pytest.mark.parametrize(
    ("name", "pattern", "covered"),
    [
        ("lm_head", "lm_head", True),
        ("language_model.lm_head", "lm_head", True),
        ("model.lm_head_norm", "lm_head", False),
        ("model.layers.0.mlp.up_proj", "up_proj", False),
        ("model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj", True),
        ("model.layers.10.mlp.down_proj", "model.layers.1", False),
        ("model.layers.1.mlp.down_proj", "model.layers.1", True),
        ("model.layers.1.mlp.down_proj", "model.layers.1*", True),
        ("model.layers.10.mlp.down_proj", "model.layers.1*", True),
        ("model.layers.1.mlp.down_proj", "*.down_proj", True),
        ("model.layers.1.mlp.down_proj", "*down", False),
        ("model.layers.1.mlp.gate", "*.mlp.gate", True),
        ("model.layers.1.mlp.gate_proj", "*.mlp.gate", False),
        ("model.layers.1.mlp.down_proj", "model.layers.[0-4].*", True),
        ("model.layers.7.mlp.down_proj", "model.layers.[0-4].*", False),
        ("model.layers.7.mlp.down_proj", "model.layers.?.mlp*", True),
        ("lm_head", "re:.*lm_head", True),
        ("model.layers.1.mlp.down_proj", "re:.*mlp.down", True),
        ("model.layers.1.mlp.down_proj", "re:mlp.down_proj", False),
        ("model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.qkv_proj", True),
        ("model.layers.1.self_attn.o_proj", "model.layers.1.self_attn.qkv_proj", False),
        ("model.layers.1.self_attn.v_proj", "*qkv_proj", True),
        ("model.layers.1.mlp.up_proj", "re:.*gate_up_proj$", True),
        ("model.layers.1.mlp.down_proj", "re:.*gate_up_proj$", False),
        ("model.layers.1.self_attn.q_proj", "*v_proj", False),
        ("model.layers.1.mlp.gate_proj", "re:.*up_proj", False),
        ("blocks.0.attn.to_k", "blocks.0.attn.to_qkv", True),
        ("blocks.0.attn.wv", "*.qkv_proj", True),
        ("Model.Head", "model.head", False),
    ],
)
def test_pattern(name, pattern, covered):
    assert matches_any(name, [pattern]) is covered


def test_one_of_many_patterns_is_enough_and_none_matches_nothing():
    assert matches_any("lm_head", ["*.q_proj", "lm_head"])
    assert not matches_any("lm_head", [])


def test_a_broken_regular_expression_is_named():
    with pytest.raises(ValueError, match=r"'re:\(' is not a valid regular expression"):
        matches_any("lm_head", ["re:("])


@pytest.mark.parametrize(
    "patterns",
    [
        [],
        ["lm_head", "*.o_proj"],
        ["*.q_proj", "*.k_proj", "*.v_proj"],
        ["*.qkv_proj"],
        ["*.gate_proj", "*.up_proj"],
        ["model.layers.3"],
        ["*"],
    ],
)
def test_a8_whole_groups_may_be_excluded(patterns):
    check_exclusions(ATTENTION + MLP, patterns)


@pytest.mark.parametrize(
    ("patterns", "excluded", "kept", "remedy"),
    [
        (["*.q_proj"], "q_proj", "k_proj, .*v_proj", "qkv_proj"),
        (["*.q_proj", "*.v_proj"], "q_proj, .*v_proj", "k_proj", "qkv_proj"),
        (["re:.*up_proj"], "up_proj", "gate_proj", "gate_up_proj"),
    ],
)
def test_a8_a_part_of_a_group_is_refused_by_name(patterns, excluded, kept, remedy):
    message = rf"covers {LAYER}.*{excluded} but not {LAYER}.*{kept}; .*Exclude {LAYER}.*{remedy} "
    with pytest.raises(ValueError, match=message):
        check_exclusions(ATTENTION + MLP, patterns)
