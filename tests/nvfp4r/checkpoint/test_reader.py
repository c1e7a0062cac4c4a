"""Reading sound checkpoints, written by hand in toy.py."""

from __future__ import annotations

import json
import logging

import pytest
import torch

import nvfp4r.checkpoint.shards
from nvfp4r.checkpoint import load_checkpoint
from nvfp4r.checkpoint.dialects import hf_quant_config
from nvfp4r.format import NVFP4Tensor
from tests.nvfp4r.checkpoint.test_dialects import SIDE
from tests.nvfp4r.sources import LINEARS
from tests.nvfp4r.toy import (
    matrix,
    quantisation_config,
    stored_module,
    write_tensors,
    write_toy,
)

DIALECTS = ["modelopt", "compressed-tensors"]


def one_module(folder, codes, scale_bytes, scalar, dialect, activations="none", **config):
    """A checkpoint of one module named "linear"."""
    folder.mkdir()
    write_tensors(folder, stored_module("linear", codes, scale_bytes, scalar, None, dialect))
    block = quantisation_config(dialect, activations, [])
    block.update(config)
    (folder / "config.json").write_text(json.dumps({"quantization_config": block}))
    return folder


@pytest.mark.parametrize("shards", [1, 3, 11])
@pytest.mark.parametrize("activations", ["nvfp4", "none"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_parameter_reads_as_it_was_written(tmp_path, dialect, activations, shards):
    toy = write_toy(tmp_path / "toy", dialect, activations, shards=shards)
    checkpoint = load_checkpoint(toy.folder)
    assert (checkpoint.dialect, checkpoint.activations) == (dialect, activations)
    assert checkpoint.modules == tuple(sorted(toy.weights))
    assert checkpoint.exclude == ("lm_head",)
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
    }
    read = dict(checkpoint.items())
    assert tuple(read) == checkpoint.names()
    assert set(read) == {*toy.plain, *(f"{module}.weight" for module in toy.weights)}
    for module, weight in toy.weights.items():
        tensor = read[f"{module}.weight"]
        assert isinstance(tensor, NVFP4Tensor)
        assert torch.equal(tensor.dequantize(), weight)
        scale = checkpoint.input_scale(module)
        if activations == "nvfp4":
            assert scale.shape == ()
            assert torch.equal(scale, toy.input_scales[module])
        else:
            assert scale is None
    for name, tensor in toy.plain.items():
        assert read[name].dtype == torch.bfloat16
        assert torch.equal(read[name], tensor)
        assert torch.equal(checkpoint[name], tensor)
    assert checkpoint.problems() == []


def test_a1_multiplier_and_divisor_give_the_same_matrix(tmp_path):
    codes = torch.arange(64, dtype=torch.uint8).reshape(2, 32) % 16
    scale_bytes = torch.tensor([[0x38, 0x40], [0x01, 0x7E]], dtype=torch.uint8)
    multiplier = float(torch.tensor(1.0) / 3584)
    matrices = [
        load_checkpoint(one_module(tmp_path / name, codes, scale_bytes, scalar, name))[
            "linear.weight"
        ].dequantize()
        for name, scalar in (("modelopt", multiplier), ("compressed-tensors", 3584.0))
    ]
    assert torch.equal(*matrices)
    assert torch.equal(matrices[0], matrix(codes, scale_bytes, multiplier))


@pytest.mark.parametrize(
    ("dialect", "config"),
    [
        ("modelopt", {}),
        ("modelopt", {"quant_algo": "NVFP4"}),  # config_groups without input_activations
        ("modelopt", {"quant_algo": "NVFP4", "config_groups": None}),
        ("compressed-tensors", {}),
    ],
)
def test_a5_weight_only_of_ones_sums_its_input(tmp_path, dialect, config):
    ones = torch.full((4, 48), 2, dtype=torch.uint8)  # code 2 is 1.0
    scale_bytes = torch.full((4, 3), 0x38, dtype=torch.uint8)  # 1.0
    folder = one_module(tmp_path / "ones", ones, scale_bytes, 1.0, dialect, **config)
    checkpoint = load_checkpoint(folder)
    assert checkpoint.activations == "none"
    assert checkpoint.input_scale("linear") is None
    x = torch.randint(-50, 50, (1, 48), generator=torch.Generator().manual_seed(3)).double()
    y = x @ checkpoint["linear.weight"].dequantize(torch.float64).T
    assert torch.equal(y, x.sum().expand(1, 4))


def test_weight_only_with_input_scales_drops_them_and_says_so(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="nvfp4r")
    toy = write_toy(
        tmp_path / "toy",
        edit_config=lambda config: config.update(
            quantization_config=quantisation_config("modelopt", "none", ["lm_head"])
        ),
    )
    checkpoint = load_checkpoint(toy.folder)
    assert checkpoint.activations == "none"
    assert checkpoint.input_scale("model.layers.0.mlp.up_proj") is None
    assert not [name for name in checkpoint.names() if "input_scale" in name]
    notes = [record.getMessage() for record in caplog.records]
    assert len(notes) == 1
    assert "input scales of 14 modules are not used" in notes[0]


@pytest.mark.parametrize("activations", ["nvfp4", "none"])
def test_a10_block_in_hf_quant_config_only(tmp_path, activations):
    toy = write_toy(
        tmp_path / "toy",
        activations=activations,
        edit_config=lambda config: config.pop("quantization_config"),
    )
    (toy.folder / "hf_quant_config.json").write_text(json.dumps(SIDE))
    checkpoint = load_checkpoint(toy.folder)
    # Nothing in this file tells W4A4 from W4A16: the input scales do.
    assert (checkpoint.dialect, checkpoint.activations) == ("modelopt", activations)
    assert len(checkpoint.modules) == 2 * len(LINEARS)
    assert checkpoint["model.layers.1.mlp.up_proj.weight"].shape == (48, 32)


def test_a10_agreeing_blocks_in_both_files(tmp_path):
    toy = write_toy(tmp_path / "toy")
    side = hf_quant_config("nvfp4", ["lm_head"], {})
    (toy.folder / "hf_quant_config.json").write_text(json.dumps(side))
    assert load_checkpoint(toy.folder).activations == "nvfp4"


def test_q3_shapes_and_bits_of_a_256x256_layer(tmp_path):
    codes = torch.full((256, 256), 5, dtype=torch.uint8)
    scale_bytes = torch.full((256, 16), 0x38, dtype=torch.uint8)
    folder = one_module(tmp_path / "q3", codes, scale_bytes, 0.5, "modelopt")
    checkpoint = load_checkpoint(folder)
    tensor = checkpoint["linear.weight"]
    assert (tensor.codes.dtype, tuple(tensor.codes.shape)) == (torch.uint8, (256, 128))
    assert tensor.block_scale.dtype == torch.float8_e4m3fn
    assert tuple(tensor.block_scale.shape) == (256, 16)
    assert tensor.bits_per_parameter <= 4.6
    info = checkpoint.info("linear.weight")
    assert (info.shape, info.dtype) == ((256, 256), "NVFP4")
    assert info.nbytes == tensor.nbytes == 256 * 128 + 256 * 16 + 4


def test_info_of_a_plain_parameter(tmp_path):
    toy = write_toy(tmp_path / "toy")
    info = load_checkpoint(toy.folder).info("lm_head.weight")
    assert (info.shape, info.dtype, info.nbytes) == ((64, 32), "BF16", 64 * 32 * 2)
    assert info.file == toy.folder / "model.safetensors"


@pytest.mark.parametrize("shape", [[], [1]])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_scalars_of_either_shape(tmp_path, dialect, shape):
    def reshape(tensors):
        for name in tensors:
            if tensors[name].numel() == 1:
                tensors[name] = tensors[name].reshape(shape)

    toy = write_toy(tmp_path / "toy", dialect, edit=reshape)
    checkpoint = load_checkpoint(toy.folder)
    for module, weight in toy.weights.items():
        tensor = checkpoint[f"{module}.weight"]
        assert tensor.global_scale.shape == ()
        assert torch.equal(tensor.dequantize(), weight)
        assert checkpoint.input_scale(module).shape == ()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_kv_cache_scales_are_no_parameters(tmp_path, dialect):
    extra = {
        "model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.5),
        "model.layers.0.self_attn.v_proj.v_scale": torch.tensor([0.25]),
    }
    toy = write_toy(
        tmp_path / "toy",
        dialect,
        edit=lambda tensors: tensors.update(extra),
        edit_config=lambda config: config["quantization_config"].update(
            kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False}
        ),
    )
    checkpoint = load_checkpoint(toy.folder)
    assert checkpoint.quant.kv_cache == "FP8"
    assert checkpoint.kv_scales == {
        "model.layers.0.self_attn.k_proj.k_scale": 0.5,
        "model.layers.0.self_attn.v_proj.v_scale": 0.25,
    }
    assert set(checkpoint.names()).isdisjoint(extra)
    assert checkpoint.problems() == []


def test_tied_embeddings_have_no_lm_head(tmp_path):
    toy = write_toy(tmp_path / "toy", edit=lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight" not in load_checkpoint(toy.folder).names()


def test_a8_a_group_that_is_excluded_as_a_whole_stays_plain(tmp_path):
    def unquantise(tensors):
        for layer in (0, 1):
            for name in ("q_proj", "k_proj", "v_proj"):
                module = f"model.layers.{layer}.self_attn.{name}"
                N, half_K = tensors.pop(f"{module}.weight").shape
                for suffix in ("weight_scale", "weight_scale_2", "input_scale"):
                    del tensors[f"{module}.{suffix}"]
                tensors[f"{module}.weight"] = torch.ones(N, 2 * half_K, dtype=torch.bfloat16)

    def exclude(config):
        config["quantization_config"]["ignore"] += ["*.q_proj", "*.k_proj", "*.v_proj"]

    toy = write_toy(tmp_path / "toy", edit=unquantise, edit_config=exclude)
    checkpoint = load_checkpoint(toy.folder)
    assert checkpoint["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert len(checkpoint.modules) == 8


def test_a_single_file_of_another_name(tmp_path):
    toy = write_toy(tmp_path / "toy")
    (toy.folder / "model.safetensors").rename(toy.folder / "weights.safetensors")
    (toy.folder / ".model.safetensors.lock").touch()
    assert len(load_checkpoint(toy.folder).modules) == 14


def test_opening_reads_scalars_only_and_streaming_keeps_one_file_open(tmp_path, monkeypatch):
    """Counts open handles and the tensors taken from them through safetensors' own interface."""
    opened = set()
    read = []
    most = 0

    class Counting:
        def __init__(self, file, framework):
            nonlocal most
            self.handle = real(file, framework=framework)
            opened.add(id(self))
            most = max(most, len(opened))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            opened.discard(id(self))

        def __del__(self):
            opened.discard(id(self))

        def __getattr__(self, name):
            return getattr(self.handle, name)

        def get_tensor(self, name):
            read.append(name)
            return self.handle.get_tensor(name)

    real = nvfp4r.checkpoint.shards.safe_open
    monkeypatch.setattr(nvfp4r.checkpoint.shards, "safe_open", Counting)
    toy = write_toy(tmp_path / "toy", shards=5)
    checkpoint = load_checkpoint(toy.folder)
    assert read
    assert {name.rpartition(".")[2] for name in read} == {"weight_scale_2", "input_scale"}
    assert most == 1
    assert not opened
    read.clear()
    assert sum(1 for _ in checkpoint.items()) == len(checkpoint.names())
    assert most == 1
    assert not opened
    assert len(read) == len(toy.plain) + 2 * len(toy.weights)  # codes and block scales


def test_unknown_names(tmp_path):
    checkpoint = load_checkpoint(write_toy(tmp_path / "toy").folder)
    with pytest.raises(KeyError, match=r"no parameter model\.nothing"):
        checkpoint["model.nothing"]
    with pytest.raises(KeyError, match="lm_head is not a quantised module"):
        checkpoint.input_scale("lm_head")
