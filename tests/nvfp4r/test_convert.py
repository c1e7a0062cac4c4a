"""Quantising a folder: values against the scalar reference, shared scales, files, failures."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from nvfp4r import reference
from nvfp4r.checkpoint import load_checkpoint
from nvfp4r.convert import quantise_checkpoint
from nvfp4r.format import NVFP4Tensor, unpack_codes
from tests.nvfp4r.sources import LINEARS, llama_tensors, write_source

DIALECTS = ("modelopt", "compressed-tensors")
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up"}
FUSED["up_proj"] = "gate_up"


def group_amax(tensors: dict[str, torch.Tensor], module: str) -> float:
    """Largest magnitude over the matrices that are fused with `module`."""
    parent, _, last = module.rpartition(".")
    members = [module]
    if last in FUSED:
        members = [f"{parent}.{name}" for name in FUSED if FUSED[name] == FUSED[last]]
    return max(float(tensors[f"{name}.weight"].abs().max()) for name in members)


def modules() -> list[str]:
    return [f"model.layers.{layer}.{name}" for layer in range(2) for name in LINEARS]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_module_equals_the_reference(tmp_path, dialect, dtype):
    tensors = llama_tensors(dtype=dtype)
    source = write_source(tmp_path / "source", tensors)
    report = quantise_checkpoint(source, tmp_path / "out", dialect=dialect)
    checkpoint = load_checkpoint(tmp_path / "out")
    assert checkpoint.modules == tuple(sorted(modules()))
    assert checkpoint.activations == "none"
    assert (report.modules, report.inexact_divisors) == (14, 0)
    for module in modules():
        quantised = checkpoint[f"{module}.weight"]
        assert isinstance(quantised, NVFP4Tensor)
        # One unit in the last place is the freedom that keeps both dialects exact.
        wanted = torch.tensor(group_amax(tensors, module) / 2688)
        steps = quantised.global_scale.view(torch.int32) - wanted.view(torch.int32)
        assert abs(int(steps)) <= 1
        codes, scale_bytes, _ = reference.quantize(
            tensors[f"{module}.weight"], quantised.global_scale
        )
        assert torch.equal(unpack_codes(quantised.codes), codes)
        assert torch.equal(quantised.block_scale.view(torch.uint8), scale_bytes)


def test_both_dialects_hold_the_same_matrices(tmp_path):
    source = write_source(tmp_path / "source", llama_tensors())
    for dialect in DIALECTS:
        quantise_checkpoint(source, tmp_path / dialect, dialect=dialect)
    one, other = (load_checkpoint(tmp_path / dialect) for dialect in DIALECTS)
    for module in modules():
        matrices = [ckpt[f"{module}.weight"].dequantize() for ckpt in (one, other)]
        assert torch.equal(*matrices)


@pytest.mark.parametrize("tied", [False, True])
def test_everything_else_is_kept_bit_for_bit(tmp_path, tied):
    tensors = llama_tensors(tied=tied)
    quantise_checkpoint(write_source(tmp_path / "source", tensors), tmp_path / "out")
    checkpoint = load_checkpoint(tmp_path / "out")
    assert set(checkpoint.names()) == set(tensors)
    plain = set(tensors) - {f"{module}.weight" for module in modules()}
    assert "model.embed_tokens.weight" in plain
    assert ("lm_head.weight" in plain) != tied
    for name in plain:
        assert checkpoint[name].dtype == torch.bfloat16
        assert torch.equal(checkpoint[name], tensors[name])


@pytest.mark.parametrize("names", [("to_q", "to_k", "to_v"), ("q_proj", "k_proj", "v_proj")])
def test_q4_fused_layers_share_one_scale_across_shards(tmp_path, names):
    """Largest weights of 1, 2 and 4 give the scale of 4, also if the largest is in another file."""
    tensors = {}
    for name, amax in zip(names, (1.0, 2.0, 4.0), strict=True):
        tensors[f"h.0.attn.{name}.weight"] = torch.full((16, 16), amax, dtype=torch.bfloat16)
    shards = [list(tensors)[:2], list(tensors)[2:]]
    source = write_source(tmp_path / "source", tensors, shards=shards)
    quantise_checkpoint(source, tmp_path / "out")
    checkpoint = load_checkpoint(tmp_path / "out")
    scales = [float(checkpoint[name].global_scale) for name in tensors]
    assert scales == pytest.approx([4 / 2688] * 3, rel=2**-23)
    assert len(set(scales)) == 1


def test_input_scales_are_shared_in_groups_and_have_headroom(tmp_path):
    source = write_source(tmp_path / "source", llama_tensors())
    amax = {module: torch.tensor(float(i + 1)) for i, module in enumerate(modules())}
    for dialect in DIALECTS:
        quantise_checkpoint(
            source,
            tmp_path / dialect,
            dialect=dialect,
            activations="nvfp4",
            input_amax=amax,
            headroom=2.0,
        )
        checkpoint = load_checkpoint(tmp_path / dialect)
        assert checkpoint.activations == "nvfp4"
        for module, own in amax.items():
            parent, _, last = module.rpartition(".")
            fused = [f"{parent}.{x}" for x in FUSED if FUSED[x] == FUSED.get(last)]
            largest = max(float(amax[name]) for name in fused) if fused else float(own)
            expected = pytest.approx(2 * largest / 2688, rel=2**-23)
            assert float(checkpoint.input_scale(module)) == expected


def test_modelopt_output_has_what_engines_read(tmp_path):
    quantise_checkpoint(write_source(tmp_path / "source", llama_tensors()), tmp_path / "out")
    side = json.loads((tmp_path / "out/hf_quant_config.json").read_text())
    assert side["producer"]["name"] == "modelopt"
    assert side["quantization"] == {
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["hidden_size"] == 32
    block = config["quantization_config"]
    assert (block["quant_method"], block["quant_algo"]) == ("modelopt", "W4A16_NVFP4")
    assert block["ignore"] == ["lm_head"]


def test_other_files_come_along(tmp_path):
    source = write_source(tmp_path / "source", llama_tensors())
    kept = ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"]
    kept += ["merges.txt", "generation_config.json", "chat_template.jinja", "LICENSE", "README.md"]
    for name in kept:
        (source / name).write_text(f"content of {name}")
    (source / "pytorch_model.bin").write_text("old weights")
    quantise_checkpoint(source, tmp_path / "out")
    for name in kept:
        assert (tmp_path / "out" / name).read_text() == f"content of {name}"
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {*kept, "config.json", "hf_quant_config.json", "model.safetensors"}


def test_the_same_input_gives_the_same_bytes(tmp_path):
    source = write_source(tmp_path / "source", llama_tensors())
    for name in ("one", "two"):
        quantise_checkpoint(source, tmp_path / name, max_shard_bytes=8192)
    files = sorted(path.name for path in (tmp_path / "one").glob("*.safetensors"))
    assert len(files) > 1
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_progress_counts_tensors_and_bytes(tmp_path):
    tensors = llama_tensors()
    source = write_source(tmp_path / "source", tensors)
    calls = []
    quantise_checkpoint(source, tmp_path / "out", progress=lambda *call: calls.append(call))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert {call[0] for call in calls} == set(tensors)
    assert [call[1:3] for call in calls] == [(i + 1, len(tensors)) for i in range(len(tensors))]
    assert [call[3] for call in calls] == sorted(call[3] for call in calls)
    assert calls[-1][3:] == (total, total)


def test_a_zero_matrix_stays_zero(tmp_path, caplog):
    """Q2: no infinite scale, a warning that names the layer."""
    name = "model.layers.0.self_attn.o_proj"
    tensors = llama_tensors() | {f"{name}.weight": torch.zeros(32, 32, dtype=torch.bfloat16)}
    source = write_source(tmp_path / "source", tensors)
    with caplog.at_level(logging.WARNING):
        quantise_checkpoint(source, tmp_path / "out")
    assert name in caplog.text
    restored = load_checkpoint(tmp_path / "out")[f"{name}.weight"].dequantize()
    assert torch.equal(restored, torch.zeros(32, 32))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_value_that_is_not_finite_is_named_and_nothing_is_written(tmp_path, name, value):
    tensors = llama_tensors()
    tensors[name].view(-1)[5] = value
    source = write_source(tmp_path / "source", tensors)
    with pytest.raises(ValueError, match=rf"{name} holds 1 NaN or infinite values of \d+, .*5\]"):
        quantise_checkpoint(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_existing_output_is_refused_and_outlives_a_failure(tmp_path):
    source = write_source(tmp_path / "source", llama_tensors())
    out = tmp_path / "out"
    quantise_checkpoint(source, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ValueError, match=r"out: exists already; .*--force"):
        quantise_checkpoint(source, out)

    def fail(name: str, done: int, *sizes: int) -> None:
        if done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantise_checkpoint(source, out, force=True, dialect="compressed-tensors", progress=fail)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}
    quantise_checkpoint(source, out, force=True, dialect="compressed-tensors")
    assert load_checkpoint(out).dialect == "compressed-tensors"
    assert not (out / "hf_quant_config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "q4"}, r"method is 'q4', need one of rtn"),
        ({"dialect": "awq"}, r"'awq', need one of modelopt, compressed-tensors"),
        ({"headroom": 2.0}, r"headroom for unquantised activations"),
        ({"input_amax": {}}, r"activation maxima .* for unquantised activations"),
        (
            {"activations": "nvfp4"},
            r"needs an activation maximum for each .* missing for 14: model",
        ),
        (
            {"activations": "nvfp4", "input_amax": {"model.layers.0.mlp.up_proj": 1.0}},
            r"missing for 13: model",
        ),
    ],
)
def test_contradicting_arguments_are_refused(tmp_path, arguments, message):
    source = write_source(tmp_path / "source", llama_tensors())
    with pytest.raises(ValueError, match=message):
        quantise_checkpoint(source, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()
