"""Decoder layers run one at a time, against the model that transformers loads as a whole."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from nvfp4r.hf.layers import LayerwiseModel, NotLayerwiseError, hidden_bytes
from nvfp4r.selection import plan_conversion
from tests.nvfp4r.toy_models import VOCAB, token_ids, toy_model

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}


def gemma3():
    """Layers of two kinds, each with its own mask and rotary frequencies; a scaled embedding."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=4, layer_types=kinds))


def gpt_neox():
    """Another spelling: gpt_neox.layers, fused q/k/v, embed_out."""
    sizes = {name: SIZES[name] for name in SIZES if name not in ("num_key_value_heads", "head_dim")}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes))


def falcon():
    """Layers that give a tuple, in transformer.h."""
    return FalconForCausalLM(
        FalconConfig(
            vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, bias=True
        )
    )


def rwkv():
    """Layers that give a tuple of three, all of which the model takes apart."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3}
    return RwkvForCausalLM(RwkvConfig(**sizes, attention_hidden_size=64, context_length=64))


MODELS = {
    "llama": lambda: toy_model("llama"),
    "qwen2": lambda: toy_model("qwen2"),
    "qwen3": lambda: toy_model("qwen3", tied=True),
    "gemma3": gemma3,
    "gpt_neox": gpt_neox,
    "falcon": falcon,
    "rwkv": rwkv,
}


def saved(folder, model: nn.Module):
    """The model as a source folder in float32."""
    model.save_pretrained(folder)
    return folder


def opened(folder, **options) -> LayerwiseModel:
    return LayerwiseModel(plan_conversion(folder, **options), CPU)


@pytest.mark.parametrize("kind", MODELS)
def test_layer_by_layer_is_the_whole_model(tmp_path, kind):
    """The last hidden states bit for bit, over rows of several lengths; one layer has weights."""
    torch.manual_seed(0)
    folder = saved(tmp_path / kind, MODELS[kind]())
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [token_ids(9), token_ids(2), token_ids(17)]
    layerwise = opened(folder)
    layerwise.load_frame()
    hidden = [None] * len(rows)
    for index in range(layerwise.count):
        layerwise.load_layer(index)
        for i in (2, 0, 1):
            hidden[i] = layerwise.run_layer(index, rows[i], hidden[i])
        layerwise.unload_layer(index)
        assert all(p.is_meta for p in layerwise.layer(index).parameters())
    last = list(whole.get_submodule(layerwise.prefix))[-1]
    seen = []
    last.register_forward_hook(
        lambda module, args, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    for row, got in zip(rows, hidden, strict=True):
        with torch.inference_mode():
            whole(input_ids=row.unsqueeze(0), use_cache=False)
        assert torch.equal(got, seen.pop())


def test_the_head_sees_what_it_sees_in_the_whole_model(tmp_path):
    model = toy_model("qwen3")
    layerwise = opened(saved(tmp_path / "toy", model), quantise_head=True)
    assert layerwise.head == "lm_head"
    layerwise.load_frame()
    row, hidden, seen = token_ids(7), None, []
    for index in range(layerwise.count):
        layerwise.load_layer(index)
        hidden = layerwise.run_layer(index, row, hidden)
    for head in (model.lm_head, layerwise.linear("lm_head")):
        head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    layerwise.run_to_head(row, hidden)
    with torch.inference_mode():
        model(row.unsqueeze(0))
    assert torch.equal(*seen)


def test_only_what_surrounds_the_layers_is_read_first(tmp_path):
    layerwise = opened(saved(tmp_path / "toy", toy_model("llama")))
    read = []
    get = layerwise._plan.tensors.get
    layerwise._plan.tensors.get = lambda name: read.append(name) or get(name)
    layerwise.load_frame()
    assert sorted(read) == ["model.embed_tokens.weight", "model.norm.weight"]
    read.clear()
    layerwise.load_layer(1)
    assert len(read) == 9
    assert all(name.startswith("model.layers.1.") for name in read)


def refusal(folder, **options) -> str:
    plan = plan_conversion(folder, **options)
    with pytest.raises(ValueError) as error:
        LayerwiseModel(plan, CPU)
    return str(error.value)


def test_fused_experts_are_refused_by_name(tmp_path):
    config = MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
    folder = saved(tmp_path / "moe", MixtralForCausalLM(config))
    message = refusal(folder)
    assert "model.layers.0.block_sparse_moe.experts.0.w1" in message
    assert "one fused parameter in MixtralForCausalLM" in message
    message = refusal(folder, exclude=["*experts*"])  # the rest cannot be run either
    assert "experts are stored one by one, but fused in transformers" in message


def test_layers_that_share_keys_and_values_are_refused_by_name(tmp_path):
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        **{"layer_types": kinds, "num_kv_shared_layers": 2, "sliding_window": 4},
        **{"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16},
    )
    folder = saved(tmp_path / "gemma4", Gemma4ForCausalLM(config))
    assert "last 2 layers of Gemma4ForCausalLM take keys and values of layers before" in refusal(
        folder, exclude=["*per_layer*"]
    )


@pytest.mark.parametrize(("exclude", "whole"), [([], False), (["*experts*"], True)])
def test_what_can_be_run_as_a_whole_is_told_apart(tmp_path, exclude, whole):
    """Nothing sees inputs of fused experts; without them the rest can be run, but as a whole."""
    config = MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
    plan = plan_conversion(saved(tmp_path / "moe", MixtralForCausalLM(config)), exclude)
    with pytest.raises(ValueError) as error:
        LayerwiseModel(plan, CPU)
    assert isinstance(error.value, NotLayerwiseError) == whole
    if whole:
        assert str(error.value).startswith(f"{error.value.reason}; ")


@pytest.mark.parametrize("kind", MODELS)
def test_sizes_of_hidden_states_are_known_before(tmp_path, kind):
    folder = saved(tmp_path / kind, MODELS[kind]())
    layerwise, rows = opened(folder), [token_ids(9), token_ids(2)]
    layerwise.load_frame()
    layerwise.load_layer(0)
    found = sum(layerwise.run_layer(0, row, None).nbytes for row in rows)
    assert hidden_bytes(plan_conversion(folder), rows, CPU) == found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_said", [True, False])
def test_dtype_on_a_gpu_is_that_of_the_configuration_or_of_the_files(tmp_path, dtype, is_said):
    """As transformers' "auto", for a device whose dtype is known without one."""
    folder = saved(tmp_path / "toy", toy_model("llama", dtype=dtype))
    if not is_said:
        edited(folder, dtype=None)
    plan, device = plan_conversion(folder), torch.device("cuda")
    assert hidden_bytes(plan, [token_ids(5)], device) == 5 * 64 * dtype.itemsize
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == dtype


def edited(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "newmodel"}, "model_type is 'newmodel', which transformers"),
        ({"model_type": "clip"}, "model_type is 'clip', which transformers"),
        ({"num_hidden_layers": 1}, "model.layers.1.mlp.down_proj"),
        ({"hidden_size": 32}, "has shape [64, 96], but LlamaForCausalLM needs [32, 96]"),
        ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, changes, message):
    folder = edited(saved(tmp_path / "toy", toy_model("llama")), **changes)
    assert message in refusal(folder)
