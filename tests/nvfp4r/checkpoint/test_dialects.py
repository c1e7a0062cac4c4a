"""Configuration blocks: what is recognised, what is refused, what is written."""

from __future__ import annotations

import copy
import json

import pytest

from nvfp4r.checkpoint.dialects import (
    CONFIG_FILE,
    SIDE_FILE,
    TENSOR_NAMES,
    config_block,
    hf_quant_config,
    read_config,
)

WEIGHTS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
MODELOPT = {
    "config_groups": {
        "group_0": {
            "input_activations": dict(WEIGHTS),
            "weights": dict(WEIGHTS),
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head"],
    "quant_algo": "NVFP4",
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quant_method": "modelopt",
}
SIDE = {
    "producer": {"name": "modelopt", "version": "0.35.1"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "format": "nvfp4-pack-quantized",
            "targets": ["Linear"],
            "weights": {**WEIGHTS, "strategy": "tensor_group", "symmetric": True},
            "input_activations": {
                **WEIGHTS,
                "strategy": "tensor_group",
                "symmetric": True,
                "dynamic": "local",
            },
        }
    },
    "ignore": ["lm_head", "re:.*gate$"],
    "kv_cache_scheme": None,
}


def changed(block: dict, **changes: object) -> dict:
    """A deep copy with dotted keys set; None removes nothing, it is stored."""
    block = copy.deepcopy(block)
    for path, value in changes.items():
        *parents, last = path.split("__")
        inner = block
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    return block


def folder(tmp_path, block=None, side=None, key="quantization_config"):
    config = {"model_type": "llama"} if block is None else {"model_type": "llama", key: block}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    if side is not None:
        (tmp_path / SIDE_FILE).write_text(json.dumps(side))
    return tmp_path


def test_modelopt_block(tmp_path):
    found = read_config(folder(tmp_path, MODELOPT))
    assert (found.dialect, found.activations) == ("modelopt", "nvfp4")
    assert found.exclude == ("lm_head",)
    assert found.targets == ("Linear",)
    assert found.kv_cache is None
    assert found.producer == "modelopt 0.47.0"
    assert found.source_file == tmp_path / CONFIG_FILE


def test_compressed_tensors_block(tmp_path):
    found = read_config(folder(tmp_path, COMPRESSED))
    assert (found.dialect, found.activations) == ("compressed-tensors", "nvfp4")
    assert found.exclude == ("lm_head", "re:.*gate$")
    assert found.producer == ""


def test_a10_block_in_the_side_file_only(tmp_path):
    found = read_config(folder(tmp_path, None, SIDE))
    assert (found.dialect, found.exclude) == ("modelopt", ("lm_head",))
    assert found.activations is None  # the tensors decide
    assert found.source_file == tmp_path / SIDE_FILE


def test_both_places_that_agree(tmp_path):
    side = changed(SIDE, quantization__exclude_modules=["lm_head", "lm_head"])
    assert read_config(folder(tmp_path, MODELOPT, side)).activations == "nvfp4"


@pytest.mark.parametrize(
    ("block", "side", "what"),
    [
        (MODELOPT, changed(SIDE, quantization__quant_algo="W4A16_NVFP4"), "the algorithm"),
        (MODELOPT, changed(SIDE, quantization__exclude_modules=[]), "the excluded modules"),
        (COMPRESSED, SIDE, "the dialect"),
    ],
)
def test_a10_both_places_that_disagree(tmp_path, block, side, what):
    message = f"{CONFIG_FILE} and .*{SIDE_FILE} disagree about {what}"
    with pytest.raises(ValueError, match=message):
        read_config(folder(tmp_path, block, side))


@pytest.mark.parametrize(
    ("block", "side", "activations"),
    [
        (changed(MODELOPT, config_groups__group_0__input_activations=None), None, "none"),
        (changed(MODELOPT, quant_algo="W4A16_NVFP4", config_groups=None), None, "none"),
        (changed(MODELOPT, config_groups=None), None, None),
        (changed(COMPRESSED, config_groups__group_0__input_activations=None), None, "none"),
        (
            changed(
                COMPRESSED,
                format="nvfp4a16-pack-quantized",
                config_groups__group_0__format="nvfp4a16-pack-quantized",
                config_groups__group_0__input_activations=None,
            ),
            None,
            "none",
        ),
        (None, changed(SIDE, quantization__quant_algo="W4A16_NVFP4"), "none"),
        (changed(MODELOPT, quant_method="modelopt_fp4"), None, "nvfp4"),
        (changed(COMPRESSED, quant_method="compressed_tensors"), None, "nvfp4"),
        (SIDE, None, None),  # the side file's layout inside config.json
    ],
)
def test_activations(tmp_path, block, side, activations):
    assert read_config(folder(tmp_path, block, side)).activations == activations


def test_input_activations_left_out_means_none(tmp_path):
    block = copy.deepcopy(MODELOPT)
    del block["config_groups"]["group_0"]["input_activations"]
    assert read_config(folder(tmp_path, block)).activations == "none"


def test_old_compressed_tensors_key(tmp_path):
    found = read_config(folder(tmp_path, COMPRESSED, key="compression_config"))
    assert found.dialect == "compressed-tensors"


@pytest.mark.parametrize(
    ("block", "side", "kv_cache"),
    [
        (changed(MODELOPT, kv_cache_scheme={"num_bits": 8, "type": "float"}), None, "FP8"),
        (changed(COMPRESSED, kv_cache_scheme={"num_bits": 8, "type": "float"}), None, "FP8"),
        (changed(COMPRESSED, kv_cache_scheme={"num_bits": 8, "type": "int"}), None, "int 8 bits"),
        (None, changed(SIDE, quantization__kv_cache_quant_algo="FP8"), "FP8"),
    ],
)
def test_kv_cache(tmp_path, block, side, kv_cache):
    assert read_config(folder(tmp_path, block, side)).kv_cache == kv_cache


GROUP = "config_groups__group_0"
REFUSED = [
    (changed(MODELOPT, quant_algo="FP8"), None, "quant_algo is 'FP8'"),
    (changed(MODELOPT, quant_algo="MIXED_PRECISION"), None, "quant_algo is 'MIXED_PRECISION'"),
    (changed(MODELOPT, quant_algo="NVFP4_AWQ"), None, "quant_algo is 'NVFP4_AWQ'"),
    (changed(MODELOPT, quant_algo="W4A8_MXFP4_FP8"), None, "quant_algo is 'W4A8_MXFP4_FP8'"),
    (changed(MODELOPT, quant_algo="INT4_AWQ"), None, "quant_algo is 'INT4_AWQ'"),
    (changed(MODELOPT, quant_algo=None), None, "quant_algo is None"),
    (changed(MODELOPT, group_size=32), None, "group_size is 32"),
    (changed(MODELOPT, **{f"{GROUP}__weights__group_size": 32}), None, "weights: group_size is 32"),
    (changed(MODELOPT, **{f"{GROUP}__weights__num_bits": 8}), None, "num_bits is 8, need 4"),
    (changed(MODELOPT, quant_algo="W4A16_NVFP4"), None, "W4A16_NVFP4 leaves activations alone"),
    (changed(MODELOPT, config_groups=[]), None, "config_groups: got list, need a JSON object"),
    (changed(MODELOPT, config_groups={}), None, "config_groups holds no group"),
    (changed(MODELOPT, ignore="lm_head"), None, "ignore is 'lm_head', need a list of names"),
    (changed(MODELOPT, quant_method="mxfp4"), None, "quant_method is 'mxfp4'"),
    (changed(MODELOPT, quant_method="gptq"), None, "quant_method is 'gptq'"),
    ({"bits": 4}, None, "quant_method is None"),
    (None, changed(SIDE, quantization__quant_algo="FP8"), f"{SIDE_FILE}: quant_algo is 'FP8'"),
    (None, changed(SIDE, quantization__group_size=128), f"{SIDE_FILE}: group_size is 128"),
    (None, changed(SIDE, quantization=[]), "quantization: got list, need a JSON object"),
    (None, {}, "quant_algo is None"),
    (changed(COMPRESSED, format="float-quantized"), None, "format is float-quantized"),
    (changed(COMPRESSED, format="mxfp4-pack-quantized"), None, "format is mxfp4-pack-quantized"),
    (changed(COMPRESSED, format="mixed-precision"), None, "format is mixed-precision"),
    (changed(COMPRESSED, config_groups={}), None, r"config_groups is \{\}"),
    (changed(COMPRESSED, config_groups={"group_0": 1}), None, "group_0: got int"),
    (changed(COMPRESSED, **{f"{GROUP}__weights": None}), None, "weights: got NoneType"),
    (changed(COMPRESSED, **{f"{GROUP}__weights__type": "int"}), None, "type is 'int'"),
    (changed(COMPRESSED, **{f"{GROUP}__weights__symmetric": False}), None, "symmetric is False"),
    (changed(COMPRESSED, **{f"{GROUP}__weights__strategy": "group"}), None, "strategy is 'group'"),
    (
        changed(COMPRESSED, **{f"{GROUP}__input_activations__num_bits": 8}),
        None,
        "input_activations: num_bits is 8",
    ),
    (
        changed(
            COMPRESSED,
            config_groups__group_1={"weights": COMPRESSED["config_groups"]["group_0"]["weights"]},
        ),
        None,
        "layers with and without 4-bit activations",
    ),
    (changed(COMPRESSED, transform_config={"config_groups": {"u": 1}}), None, "transform_config"),
    (changed(COMPRESSED, sparsity_config={"format": "sparse-24"}), None, "sparsity_config"),
    ([], None, "quantization_config: got list, need a JSON object"),
]


@pytest.mark.parametrize(("block", "side", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refused(tmp_path, block, side, message):
    with pytest.raises(ValueError, match=message):
        read_config(folder(tmp_path, block, side))


@pytest.mark.parametrize(
    ("block", "side"),
    [
        (changed(MODELOPT, quant_algo="FP8"), None),
        (changed(MODELOPT, quant_method="mxfp4"), None),
        (None, changed(SIDE, quantization__group_size=32)),
        (changed(COMPRESSED, format="int-quantized"), None),
    ],
)
def test_a_refusal_names_the_file_and_what_is_supported(tmp_path, block, side):
    file = CONFIG_FILE if side is None else SIDE_FILE
    with pytest.raises(ValueError, match=rf"{file}: .*NVFP4 or W4A16_NVFP4.*nvfp4-pack-quantized"):
        read_config(folder(tmp_path, block, side))


def test_no_block_at_all(tmp_path):
    with pytest.raises(ValueError, match=r"no quantization_config.*reset-quantize"):
        read_config(folder(tmp_path))


@pytest.mark.parametrize("file", [CONFIG_FILE, SIDE_FILE])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe{}", "cannot be read as JSON"),
        (b"[1]", "got list, need a JSON object"),
    ],
)
def test_broken_json_names_the_file(tmp_path, file, content, message):
    folder(tmp_path, MODELOPT, SIDE)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{file}: {message}"):
        read_config(tmp_path)


def test_missing_config(tmp_path):
    with pytest.raises(ValueError, match=rf"{CONFIG_FILE}: no such file"):
        read_config(tmp_path)


@pytest.mark.parametrize("dialect", list(TENSOR_NAMES))
@pytest.mark.parametrize("activations", ["nvfp4", "none"])
def test_what_is_written_reads_back(tmp_path, dialect, activations):
    producer = {"name": "reset-decoding", "version": "1.2", "torch": "2.13"}
    exclude = ("lm_head", "*.mlp.gate")
    block = config_block(dialect, activations, exclude, producer)
    assert block["producer"] == producer
    side = hf_quant_config(activations, exclude, producer) if dialect == "modelopt" else None
    found = read_config(folder(tmp_path, block, side))
    assert (found.dialect, found.activations) == (dialect, activations)
    assert found.exclude == exclude
    assert found.producer == "reset-decoding 1.2"


@pytest.mark.parametrize("activations", ["nvfp4", "none"])
def test_the_side_file_alone_names_its_producer(tmp_path, activations):
    side = hf_quant_config(activations, ["lm_head"], {"name": "reset-decoding", "version": "1.2"})
    assert side["producer"]["name"] == "modelopt"  # what loaders look for
    found = read_config(folder(tmp_path, None, side))
    assert found.activations == (None if activations == "nvfp4" else "none")
    assert found.producer == "reset-decoding 1.2"


def test_written_blocks_match_the_published_layouts():
    producer = {"name": "modelopt", "version": "0.47.0"}
    assert config_block("modelopt", "nvfp4", ["lm_head"], producer) == MODELOPT
    written = config_block("compressed-tensors", "nvfp4", COMPRESSED["ignore"], {})
    assert written == {**COMPRESSED, "producer": {}}
    side = hf_quant_config("nvfp4", ["lm_head"], {})
    assert side["quantization"] == SIDE["quantization"]


def test_weight_only_blocks_have_no_activations():
    modelopt = config_block("modelopt", "none", [], {})
    assert modelopt["quant_algo"] == "W4A16_NVFP4"
    assert "input_activations" not in modelopt["config_groups"]["group_0"]
    compressed = config_block("compressed-tensors", "none", [], {})
    assert compressed["config_groups"]["group_0"]["input_activations"] is None
    assert hf_quant_config("none", [], {})["quantization"]["quant_algo"] == "W4A16_NVFP4"
