"""load_model against plain transformers models on the dequantised weights."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nvfp4r.calibration import calibrate
from nvfp4r.checkpoint import load_checkpoint
from nvfp4r.format import NVFP4Tensor
from nvfp4r.hf import load_model, saturation
from nvfp4r.linear import NVFP4Linear
from nvfp4r.quantize import global_scale_from_amax, quantize
from tests.nvfp4r.toy_models import (
    config_of,
    dequantised,
    linear_names,
    named_tensors,
    save_quantised,
    token_ids,
    toy_model,
)

DIALECTS = ("modelopt", "compressed-tensors")


def logits(model, ids):
    with torch.inference_mode():
        return model(input_ids=ids).logits


def input_scales(model, headroom=1.0):
    names = linear_names(model)
    amax = calibrate(model, [token_ids(2, 24)], names)
    return {name: global_scale_from_amax(amax[name], name, headroom) for name in names}


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "per_call"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_the_dequantised_model(tmp_path, kind, dialect, dtype, keep):
    model = toy_model(kind)
    tensors = save_quantised(model, tmp_path / "q", dialect=dialect)
    loaded = load_model(tmp_path / "q", dtype=dtype, keep_dequantized=keep)
    expected = logits(dequantised(model, tensors, dtype), token_ids(2, 11))
    assert expected.dtype == dtype
    for _ in range(2):  # before and after the layers hold a dequantised copy
        assert torch.equal(logits(loaded, token_ids(2, 11)), expected)
    copies = {m._matrix is not None for m in loaded.modules() if isinstance(m, NVFP4Linear)}
    assert copies == {keep}
    assert not torch.equal(expected, logits(model.to(dtype), token_ids(2, 11)))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_w4a4_checkpoint_with_activations_off_is_exact_too(tmp_path, dialect):
    model = toy_model("qwen2")
    tensors = save_quantised(
        model, tmp_path / "q", dialect=dialect, input_scales=input_scales(model)
    )
    expected = logits(dequantised(model, tensors, torch.float32), token_ids(2, 11))
    loaded = load_model(tmp_path / "q", activations="none")
    assert torch.equal(logits(loaded, token_ids(2, 11)), expected)
    assert saturation(loaded) == {}


@pytest.mark.parametrize("activations", ["none", "nvfp4"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_greedy_generation(tmp_path, kind, activations):
    model = toy_model(kind)
    tensors = save_quantised(model, tmp_path / "q", input_scales=input_scales(model))
    loaded = load_model(tmp_path / "q", activations=activations)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    out = loaded.generate(token_ids(2, 7), **options)
    assert out.shape == (2, 19)
    if activations == "none":
        plain = dequantised(model, tensors, torch.float32)
        assert torch.equal(out, plain.generate(token_ids(2, 7), **options))
    # Whatever the activations: the cache must not change what one forward pass says.
    assert torch.equal(out[:, 7:], logits(loaded, out)[:, 6:-1].argmax(-1))


def test_w4a4_uses_the_stored_scales_and_counts_saturation(tmp_path, caplog):
    model = toy_model("llama")
    scales = input_scales(model, headroom=4.0)
    clipped = "model.layers.1.mlp.down_proj"
    scales[clipped] = scales[clipped] / 4096
    tensors = save_quantised(model, tmp_path / "q", input_scales=scales)
    loaded = load_model(tmp_path / "q")
    layers = {n: m for n, m in loaded.named_modules() if isinstance(m, NVFP4Linear)}
    assert sorted(layers) == sorted(linear_names(model))
    for name, layer in layers.items():
        assert (layer.activations, layer.name) == ("nvfp4", name)
        assert torch.equal(layer.input_scale, load_checkpoint(tmp_path / "q").input_scale(name))
    y = logits(loaded, token_ids(2, 24))
    assert torch.isfinite(y).all()
    assert not torch.equal(y, logits(dequantised(model, tensors, torch.float32), token_ids(2, 24)))
    counts = saturation(loaded)
    assert {name for name, count in counts.items() if count} == {clipped}
    assert sorted(counts) == sorted(layers)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [clipped]


@pytest.mark.parametrize("M", [1, 8, 64])
@pytest.mark.parametrize("activations", ["none", "nvfp4"])
def test_a11_a_zero_input_gives_the_bias(tmp_path, activations, M):
    model = toy_model("qwen2", dtype=torch.bfloat16)
    q_proj = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        q_proj.bias.copy_(torch.arange(1, 65))
    save_quantised(model, tmp_path / "q", input_scales=input_scales(model))
    layer = load_model(tmp_path / "q", activations=activations).get_submodule(
        "model.layers.0.self_attn.q_proj"
    )
    y = layer(torch.zeros(M, 64, dtype=torch.bfloat16))
    assert torch.equal(y, torch.arange(1, 65).to(torch.bfloat16).expand(M, 64))


def test_a13_loads_without_any_quantiser_package(tmp_path):
    model = toy_model("qwen3")
    save_quantised(model, tmp_path / "q", dialect="compressed-tensors")
    model.save_pretrained(tmp_path / "source")
    script = """
        import sys
        import torch
        from nvfp4r.hf import load_model
        from safetensors.torch import load_file
        source = load_file(sys.argv[1] + "/source/model.safetensors")
        model = load_model(sys.argv[1] + "/q")
        assert torch.isfinite(model(input_ids=torch.arange(3, 12)[None]).logits).all()
        quantised = 0
        for name, module in model.named_modules():
            if type(module).__name__ == "NVFP4Linear":
                pair = module.weight.dequantize().flatten(), source[name + ".weight"].flatten()
                cosine = torch.nn.functional.cosine_similarity(*pair, dim=0)
                assert cosine > 0.99, (name, cosine)
                quantised += 1
        foreign = {"modelopt", "compressed_tensors", "llmcompressor"} & set(sys.modules)
        print(quantised, sorted(foreign))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "14 []"), done.stderr


def test_tied_embeddings_stay_tied(tmp_path):
    model = toy_model("llama", tied=True)
    tensors = save_quantised(model, tmp_path / "q")
    assert "lm_head.weight" not in load_checkpoint(tmp_path / "q").names()
    loaded = load_model(tmp_path / "q")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    expected = logits(dequantised(model, tensors, torch.float32), token_ids(1, 9))
    assert torch.equal(logits(loaded, token_ids(1, 9)), expected)


@pytest.mark.parametrize("quantise_head", [True, False])
def test_a_head_that_is_stored_apart_is_not_tied_away(tmp_path, quantise_head):
    model = toy_model("llama")
    names = linear_names(model, head=quantise_head)
    tensors = save_quantised(
        model,
        tmp_path / "q",
        tensors=named_tensors(model, names),
        config=config_of(model) | {"tie_word_embeddings": True},
        exclude=() if quantise_head else ("lm_head",),
    )
    loaded = load_model(tmp_path / "q")
    assert isinstance(loaded.lm_head, NVFP4Linear) == quantise_head
    if quantise_head:
        loaded.tie_weights()  # as transformers does when embeddings are resized
    expected = logits(dequantised(model, tensors, torch.float32), token_ids(1, 9))
    assert torch.equal(logits(loaded, token_ids(1, 9)), expected)


def test_the_model_is_ready_for_inference(tmp_path):
    model = toy_model("llama", dtype=torch.bfloat16)
    save_quantised(model, tmp_path / "q")
    model.generation_config.update(do_sample=True, temperature=0.625)
    model.generation_config.save_pretrained(tmp_path / "q")
    loaded = load_model(tmp_path / "q", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert loaded.generation_config.temperature == 0.625
    assert not loaded.training
    assert not any(module.training for module in loaded.modules())
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert not any(t.is_meta for t in [*loaded.parameters(), *loaded.buffers()])
    assert not hasattr(loaded.config, "quantization_config")


def test_without_a_dtype_in_the_config_the_first_parameter_decides(tmp_path):
    model = toy_model("llama", dtype=torch.bfloat16)
    config = {k: v for k, v in config_of(model).items() if k not in ("dtype", "torch_dtype")}
    save_quantised(model, tmp_path / "q", config=config)
    assert load_model(tmp_path / "q").dtype == torch.bfloat16
    assert load_model(tmp_path / "q", dtype=torch.float16).dtype == torch.float16


def test_parameters_that_transformers_keeps_in_float32_stay_there(tmp_path, monkeypatch):
    model = toy_model("llama")
    save_quantised(model, tmp_path / "q")
    monkeypatch.setattr(type(model), "_keep_in_fp32_modules_strict", ["input_layernorm"])
    loaded = load_model(tmp_path / "q", dtype=torch.bfloat16)
    dtypes = {name.split(".")[-2]: p.dtype for name, p in loaded.named_parameters()}
    assert dtypes["input_layernorm"] == torch.float32
    assert dtypes["post_attention_layernorm"] == torch.bfloat16


def test_kv_scales_are_left_alone_and_logged_once(tmp_path, caplog):
    model = toy_model("llama")
    tensors = save_quantised(model, tmp_path / "q")
    shard = tmp_path / "q" / "model.safetensors"
    scales = {
        f"model.layers.0.self_attn.{part}_proj.{part}_scale": torch.tensor(0.5) for part in "kv"
    }
    save_file(load_file(shard) | scales, shard)
    with caplog.at_level(logging.INFO, logger="nvfp4r.hf"):
        loaded = load_model(tmp_path / "q")
    assert [r.getMessage() for r in caplog.records if r.name == "nvfp4r.hf.load"] == [
        f"{tmp_path / 'q'}: holds 2 KV-cache scales; they are not used, the cache keeps the "
        "model's dtype"
    ]
    plain = dequantised(model, tensors, torch.float32)
    assert torch.equal(logits(loaded, token_ids(1, 9)), logits(plain, token_ids(1, 9)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activations": "nvfp4"}, "is W4A16.*reset-quantize --activations nvfp4"),
        ({"activations": "int8"}, "activations is 'int8', need one of checkpoint, none, nvfp4"),
        ({"dtype": torch.float64}, "dtype is torch.float64, need 'auto'"),
    ],
)
def test_options_that_do_not_fit(tmp_path, options, message):
    save_quantised(toy_model("llama"), tmp_path / "q")
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "q", **options)


FOREIGN = quantize(torch.ones(16, 32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.0.mlp.experts.3.up_proj.weight": FOREIGN}, r"experts\.3\.up_proj.*vLLM"),
        ({"model.layers.0.mlp.extra.weight": FOREIGN}, r"layers\.0\.mlp\.extra quantised, but no"),
        ({"model.layers.7.input_layernorm.weight": torch.ones(64)}, r"layers\.7.*stored, but unkn"),
        ({"model.layers.0.mlp.up_proj.bias": torch.ones(96)}, r"up_proj\.bias stored, but unknown"),
        ({"model.norm.weight": None}, r"model\.norm\.weight missing, but LlamaForCausalLM"),
        ({"model.layers.1.mlp.up_proj.weight": None}, r"layers\.1\.mlp\.up_proj\.weight missing"),
        ({"lm_head.weight": None}, r"lm_head\.weight missing"),
        ({"model.norm.weight": torch.ones(32)}, r"norm\.weight has shape \[32\].*needs \[64\]"),
        (
            {"model.layers.1.mlp.down_proj.weight": FOREIGN},
            r"layers\.1\.mlp\.down_proj\.weight has shape \[16, 32\].*needs \[64, 96\]",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_parameters_that_do_not_fit_the_model(tmp_path, change, message):
    model = toy_model("llama")
    tensors = named_tensors(model, linear_names(model)) | change
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_quantised(model, tmp_path / "q", tensors=tensors)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "q")


def test_names_that_the_model_is_known_not_to_use_are_skipped(tmp_path):
    model = toy_model("llama")
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    tensors = named_tensors(model, linear_names(model)) | inv_freq
    save_quantised(model, tmp_path / "q", tensors=tensors)
    plain = dequantised(model, tensors, torch.float32)
    assert torch.equal(
        logits(load_model(tmp_path / "q"), token_ids(1, 9)), logits(plain, token_ids(1, 9))
    )


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("brand_new", "model_type is 'brand_new', which transformers .* does not know"),
        ("t5", "model_type is 't5', which transformers does not have as a causal"),
    ],
)
def test_model_types_that_cannot_be_built(tmp_path, model_type, message):
    model = toy_model("llama")
    save_quantised(model, tmp_path / "q", config=config_of(model) | {"model_type": model_type})
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "q")


def test_weights_are_not_copied_on_the_way(tmp_path, monkeypatch):
    """What the checkpoint hands out is what the model holds, and only quantised once."""
    model = toy_model("llama")
    save_quantised(model, tmp_path / "q")
    handed_out = {}
    plain_items = type(load_checkpoint(tmp_path / "q")).items

    def recording_items(self):
        for name, tensor in plain_items(self):
            part = tensor.codes if isinstance(tensor, NVFP4Tensor) else tensor
            handed_out[name] = part.data_ptr()
            yield name, tensor

    monkeypatch.setattr("nvfp4r.checkpoint.NVFP4Checkpoint.items", recording_items)
    loaded = load_model(tmp_path / "q")
    held = {name: value.data_ptr() for name, value in loaded.named_parameters()}
    held |= {
        f"{name}.weight": module.codes.data_ptr()
        for name, module in loaded.named_modules()
        if isinstance(module, NVFP4Linear)
    }
    assert held == handed_out
    assert sum(isinstance(m, nn.Linear) for m in loaded.modules()) == 1  # the head
