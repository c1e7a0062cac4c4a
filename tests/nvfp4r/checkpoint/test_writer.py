"""What the writer puts on the disk, and that it reads back bit for bit."""

from __future__ import annotations

import json
import logging
import os
import weakref

import numpy as np
import pytest
import safetensors
import torch
from safetensors import safe_open

import nvfp4r
from nvfp4r.checkpoint import load_checkpoint
from nvfp4r.checkpoint.writer import save_checkpoint
from nvfp4r.format import NVFP4Tensor
from nvfp4r.quantize import divisor_for, global_scale_from_amax, quantize
from tests.nvfp4r.toy import quantisation_config, write_toy

DIALECTS = ["modelopt", "compressed-tensors"]
CONFIG = {"model_type": "llama", "hidden_size": 32}


def matrix(N=48, K=32, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(N, K, generator=random).bfloat16()


def model(layers=2):
    """Parameters of a small model quantised by nvfp4r, and input scales of its modules."""
    tensors = {"model.embed_tokens.weight": matrix(64, 32, 99)}
    input_scales = {}
    for layer in range(layers):
        tensors[f"model.layers.{layer}.norm.weight"] = matrix(1, 32, layer)[0]
        for number, name in enumerate(("gate_proj", "up_proj")):
            module = f"model.layers.{layer}.mlp.{name}"
            seed = 10 * layer + number
            tensors[f"{module}.weight"] = quantize(matrix(seed=seed))
            input_scales[module] = global_scale_from_amax(1.7 + seed)
    return tensors, input_scales


def assert_same(one, other):
    if isinstance(one, NVFP4Tensor):
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.block_scale.view(torch.uint8), other.block_scale.view(torch.uint8))
        assert torch.equal(one.global_scale, other.global_scale)
    else:
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def copy(source, path, **options):
    """Writes what `load_checkpoint` gave; the options override the source's own."""
    activations = options.setdefault("activations", source.activations)
    if activations == "nvfp4":
        options["input_scales"] = {name: source.input_scale(name) for name in source.modules}
    options.setdefault("dialect", source.dialect)
    return save_checkpoint(
        path, source.items(), config=source.config, exclude=source.exclude, **options
    )


@pytest.mark.parametrize("max_shard_bytes", [1, 3000, 1 << 30])
@pytest.mark.parametrize("activations", ["nvfp4", "none"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_read_of_write_is_identical(tmp_path, dialect, activations, max_shard_bytes):
    tensors, input_scales = model()
    save_checkpoint(
        tmp_path / "out",
        tensors.items(),
        config=CONFIG,
        dialect=dialect,
        activations=activations,
        input_scales=input_scales if activations == "nvfp4" else None,
        exclude=["lm_head"],
        max_shard_bytes=max_shard_bytes,
    )
    checkpoint = load_checkpoint(tmp_path / "out")
    assert (checkpoint.dialect, checkpoint.activations) == (dialect, activations)
    assert checkpoint.config == CONFIG
    assert checkpoint.exclude == ("lm_head",)
    assert set(checkpoint.names()) == set(tensors)
    for name, tensor in checkpoint.items():
        assert_same(tensor, tensors[name])
    for module, scale in input_scales.items():
        read = checkpoint.input_scale(module)
        assert read is None if activations == "none" else torch.equal(read, scale)
    assert checkpoint.problems() == []


@pytest.mark.parametrize("activations", ["nvfp4", "none"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_foreign_checkpoint_survives_a_copy_in_its_own_dialect(tmp_path, dialect, activations):
    toy = write_toy(tmp_path / "toy", dialect, activations, shards=3)
    source = load_checkpoint(toy.folder)
    copy(source, tmp_path / "copy")
    read = load_checkpoint(tmp_path / "copy")
    for name, tensor in source.items():
        assert_same(read[name], tensor)
    for module, scale in toy.input_scales.items():
        assert torch.equal(read.input_scale(module), scale)


@pytest.mark.parametrize("first", DIALECTS)
def test_our_scales_survive_both_conversions(tmp_path, first):
    second = DIALECTS[1 - DIALECTS.index(first)]
    tensors, input_scales = model(layers=8)
    report = save_checkpoint(
        tmp_path / "1",
        tensors.items(),
        config=CONFIG,
        dialect=first,
        activations="nvfp4",
        input_scales=input_scales,
    )
    assert report.inexact_divisors == 0
    for step, dialect in ((2, second), (3, first)):
        source = load_checkpoint(tmp_path / str(step - 1))
        assert copy(source, tmp_path / str(step), dialect=dialect).inexact_divisors == 0
    read = load_checkpoint(tmp_path / "3")
    assert read.dialect == first
    for name, tensor in tensors.items():
        assert_same(read[name], tensor)
    for module, scale in input_scales.items():
        assert torch.equal(read.input_scale(module), scale)


def test_a_foreign_scale_without_a_divisor_moves_by_one_unit_and_is_counted(tmp_path, caplog):
    # Above the square root of 2 a significand has more neighbours than its reciprocal.
    scale = next(
        scale
        for scale in (torch.tensor(1.9 + n * 2.0**-23) * 2.0**-12 for n in range(100))
        if divisor_for(scale) is None
    )
    quantised = quantize(matrix())
    tensors = {
        "a.weight": NVFP4Tensor(quantised.codes, quantised.block_scale, scale),
        "b.weight": quantised,
    }
    scales = {"a": scale, "b": torch.tensor(1.0)}
    options = {"config": {}, "activations": "nvfp4", "input_scales": scales}
    report = save_checkpoint(tmp_path / "m", tensors.items(), dialect="modelopt", **options)
    assert report.inexact_divisors == 0
    assert not caplog.records
    report = save_checkpoint(tmp_path / "c", tensors.items(), dialect=DIALECTS[1], **options)
    assert report.inexact_divisors == 2
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "2 scales, first a.weight_global_scale, have no exact float32 divisor" in warnings[0]
    read = load_checkpoint(tmp_path / "c")["a.weight"].global_scale
    neighbours = [torch.nextafter(scale, torch.tensor(end)) for end in (0.0, 1.0)]
    assert any(torch.equal(read, neighbour) for neighbour in neighbours)


def stored_module(out, module):
    """The tensors of a module as they are in the file, and dtype and shape by suffix."""
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        stored = {key: file.get_tensor(key) for key in file.keys() if key.startswith(module)}  # noqa: SIM118
    layout = {
        key.rpartition(".")[2]: (tensor.dtype, list(tensor.shape)) for key, tensor in stored.items()
    }
    return stored, layout


@pytest.mark.parametrize("activations", ["nvfp4", "none"])
def test_modelopt_on_the_disk(tmp_path, activations):
    tensors, input_scales = model(1)
    scales = input_scales if activations == "nvfp4" else None
    out = tmp_path / "out"
    save_checkpoint(
        out, tensors.items(), config=CONFIG, activations=activations, input_scales=scales
    )
    module = "model.layers.0.mlp.up_proj"
    stored, layout = stored_module(out, module)
    expected = {
        "weight": (torch.uint8, [48, 16]),
        "weight_scale": (torch.float8_e4m3fn, [48, 2]),
        "weight_scale_2": (torch.float32, []),
    }
    if activations == "nvfp4":
        expected["input_scale"] = (torch.float32, [])
        assert torch.equal(stored[f"{module}.input_scale"], input_scales[module])
    assert layout == expected
    assert torch.equal(stored[f"{module}.weight_scale_2"], tensors[f"{module}.weight"].global_scale)
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    side = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    algorithm = "NVFP4" if activations == "nvfp4" else "W4A16_NVFP4"
    assert block["quant_algo"] == side["quant_algo"] == algorithm
    assert side["group_size"] == 16


@pytest.mark.parametrize("activations", ["nvfp4", "none"])
def test_compressed_tensors_on_the_disk(tmp_path, activations):
    tensors, input_scales = model(1)
    scales = input_scales if activations == "nvfp4" else None
    out = tmp_path / "out"
    save_checkpoint(
        out,
        tensors.items(),
        config={**CONFIG, "compression_config": {"old": 1}, "quantization_config": {"old": 1}},
        dialect="compressed-tensors",
        activations=activations,
        input_scales=scales,
        exclude=["lm_head"],
    )
    module = "model.layers.0.mlp.up_proj"
    stored, layout = stored_module(out, module)
    expected = {
        "weight_packed": (torch.uint8, [48, 16]),
        "weight_scale": (torch.float8_e4m3fn, [48, 2]),
        "weight_global_scale": (torch.float32, [1]),
    }
    if activations == "nvfp4":
        expected["input_global_scale"] = (torch.float32, [1])
    assert layout == expected
    divisor = stored[f"{module}.weight_global_scale"]
    assert torch.equal(1.0 / divisor[0], tensors[f"{module}.weight"].global_scale)
    config = json.loads((out / "config.json").read_text())
    block = config.pop("quantization_config")
    assert config == CONFIG
    assert block.pop("producer")["name"] == "reset-decoding"
    assert block == quantisation_config("compressed-tensors", activations, ["lm_head"])
    assert not (out / "hf_quant_config.json").exists()


def test_q3_a_256x256_layer_stays_in_its_bit_budget(tmp_path):
    report = save_checkpoint(
        tmp_path / "out", [("linear.weight", quantize(matrix(256, 256)))], config={}
    )
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        codes = file.get_tensor("linear.weight")
        block_scale = file.get_tensor("linear.weight_scale")
    assert (codes.dtype, list(codes.shape)) == (torch.uint8, [256, 128])
    assert (block_scale.dtype, list(block_scale.shape)) == (torch.float8_e4m3fn, [256, 16])
    assert report.bits_per_parameter == 8 * (256 * 128 + 256 * 16 + 4) / 256**2
    assert report.bits_per_parameter <= 4.6
    assert (report.modules, report.tensor_bytes) == (1, 256 * 128 + 256 * 16 + 4)


def test_shards_and_index(tmp_path):
    tensors, _ = model(3)
    limit = 4096
    out = tmp_path / "out"
    report = save_checkpoint(out, tensors.items(), config=CONFIG, max_shard_bytes=limit)
    count = len(report.files)
    assert count > 2
    assert report.files == tuple(
        f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": report.tensor_bytes}
    held = {}
    for file in report.files:
        with safe_open(out / file, framework="pt") as handle:
            stored = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
        assert sum(tensor.nbytes for tensor in stored.values()) <= limit
        held |= dict.fromkeys(stored, file)
    assert index["weight_map"] == held
    for name, tensor in tensors.items():
        if isinstance(tensor, NVFP4Tensor):
            parts = {held[f"{name}{suffix}"] for suffix in ("", "_scale", "_scale_2")}
            assert len(parts) == 1
    assert sorted(os.listdir(out)) == sorted(
        [*report.files, "config.json", "hf_quant_config.json", "model.safetensors.index.json"]
    )


def test_at_most_one_shard_is_held(tmp_path):
    alive: list[weakref.ref] = []
    most = 0

    def stream():
        nonlocal most
        for i in range(20):
            array = np.zeros(1 << 16, dtype=np.float32)
            alive.append(weakref.ref(array))
            tensor = torch.from_numpy(array)  # shares, and keeps alive, the array
            del array
            most = max(most, sum(ref() is not None for ref in alive))
            yield f"tensor_{i}", tensor
            del tensor

    report = save_checkpoint(
        tmp_path / "out", stream(), config={}, max_shard_bytes=3 * (1 << 18) + 100
    )
    assert len(report.files) == 7
    assert most == 4  # a full shard, and the tensor that did not fit into it


def test_shared_scales_and_tied_tensors_are_written_for_each_name(tmp_path):
    shared = global_scale_from_amax(8.0)
    weights = {f"mlp.{name}_proj.weight": quantize(matrix(), global_scale=shared) for name in "ab"}
    table = matrix(64, 32)
    tensors = {**weights, "embed.weight": table, "lm_head.weight": table, "view": table[3]}
    save_checkpoint(tmp_path / "out", tensors.items(), config={}, exclude=["lm_head"])
    for name, tensor in load_checkpoint(tmp_path / "out").items():
        assert_same(tensor, tensors[name])


def test_non_contiguous_tensors_are_written_as_they_read(tmp_path):
    table = matrix(64, 32).T
    save_checkpoint(tmp_path / "out", [("embed.weight", table)], config={})
    assert torch.equal(load_checkpoint(tmp_path / "out")["embed.weight"], table)


def test_r5_versions_are_recorded(tmp_path):
    out = tmp_path / "out"
    details = {"method": "rtn", "calibration": {"samples": 8}}
    save_checkpoint(out, model()[0].items(), config={}, producer_details=details)
    expected = {
        "name": "reset-decoding",
        "version": nvfp4r.__version__,
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        **details,
    }
    assert json.loads((out / "config.json").read_text())["quantization_config"]["producer"] == (
        expected
    )
    side = json.loads((out / "hf_quant_config.json").read_text())
    assert side["producer"] == {"name": "modelopt", "written_by": expected}
    assert load_checkpoint(out).quant.producer == f"reset-decoding {nvfp4r.__version__}"


def test_a10_the_side_file_is_enough(tmp_path):
    out = tmp_path / "out"
    save_checkpoint(out, model()[0].items(), config=CONFIG, exclude=["lm_head"])
    (out / "config.json").write_text(json.dumps(CONFIG))
    checkpoint = load_checkpoint(out)
    assert (checkpoint.dialect, checkpoint.activations) == ("modelopt", "none")
    assert checkpoint.exclude == ("lm_head",)


def test_other_files_are_copied(tmp_path):
    source = tmp_path / "model"
    for name in (
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "config.json",
        "hf_quant_config.json",
        ".gitattributes",
        ".cache/lock",
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(f"content of {name}")
    (tmp_path / "blob").write_text("content of vocab.txt")
    (source / "vocab.txt").symlink_to(tmp_path / "blob")
    out = tmp_path / "out"
    save_checkpoint(out, model()[0].items(), config=CONFIG, copy_from=source)
    found = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    written = {"model.safetensors", "config.json", "hf_quant_config.json"}
    copied = {
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
        "vocab.txt",
    }
    assert found == written | copied
    for name in copied:
        assert (out / name).read_text() == f"content of {name}"
        assert not (out / name).is_symlink()
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
