"""Toy NVFP4 checkpoints in either dialect, written by hand from the format's description.

Uses safetensors and json alone and none of nvfp4r's code, so that a reader is tested against an
independent writer; `expect_refusal` alone calls the reader. The truth about every matrix is kept in
float32, rounded once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nvfp4r.checkpoint import load_checkpoint
from tests.nvfp4r.sources import HIDDEN, LINEARS, VOCABULARY

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Tensors = dict[str, Tensor]


@dataclass
class Toy:
    """What a toy checkpoint holds.

    Attributes:
        folder: where it is.
        weights: [N, K] float32 of every quantised module, as it must be read.
        input_scales: multipliers of every quantised module (W4A4), else empty.
        plain: every other parameter.
    """

    folder: Path
    weights: Tensors = field(default_factory=dict)
    input_scales: Tensors = field(default_factory=dict)
    plain: Tensors = field(default_factory=dict)


def e4m3_value(byte: int) -> float:
    """The value of an E4M3 byte (sign, 4 exponent bits of bias 7, 3 mantissa bits)."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 0xF, byte & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def pack(codes: Tensor) -> Tensor:
    """[N, K] codes to [N, K/2] bytes, even columns in the low nibble."""
    return codes[:, 0::2] + 16 * codes[:, 1::2]


def matrix(codes: Tensor, scale_bytes: Tensor, multiplier: float) -> Tensor:
    """[N, K] float32 of codes [N, K], scale bytes [N, K/16] and a float32 multiplier."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    scales = torch.tensor([e4m3_value(byte) for byte in range(256)], dtype=torch.float64)
    columns = scales[scale_bytes.long()].repeat_interleave(16, dim=1)
    return (values[codes.long()] * columns * multiplier).float()


def stored_module(
    module: str,
    codes: Tensor,
    scale_bytes: Tensor,
    scalar: float,
    input_scalar: float | None,
    dialect: str,
) -> Tensors:
    """The tensors of one module; `scalar` and `input_scalar` go to the file as they are."""
    packed = {f"{module}.weight_scale": scale_bytes.view(torch.float8_e4m3fn)}
    if dialect == "modelopt":
        packed[f"{module}.weight"] = pack(codes)
        packed[f"{module}.weight_scale_2"] = torch.tensor(scalar)
        if input_scalar is not None:
            packed[f"{module}.input_scale"] = torch.tensor(input_scalar)
    else:
        packed[f"{module}.weight_packed"] = pack(codes)
        packed[f"{module}.weight_global_scale"] = torch.tensor([scalar])
        if input_scalar is not None:
            packed[f"{module}.input_global_scale"] = torch.tensor([input_scalar])
    return packed


def quantisation_config(dialect: str, activations: str, exclude: list[str]) -> dict[str, Any]:
    """The block of config.json as the two export tools write it."""
    arguments: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": 16}
    if dialect == "modelopt":
        arguments["dynamic"] = False
        group = {"weights": arguments, "targets": ["Linear"]}
        if activations == "nvfp4":
            group["input_activations"] = dict(arguments)
        return {
            "config_groups": {"group_0": group},
            "ignore": exclude,
            "quant_algo": "NVFP4" if activations == "nvfp4" else "W4A16_NVFP4",
            "producer": {"name": "modelopt", "version": "0.47.0"},
            "quant_method": "modelopt",
        }
    arguments |= {"strategy": "tensor_group", "symmetric": True}
    inputs = {**arguments, "dynamic": "local"} if activations == "nvfp4" else None
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "format": "nvfp4-pack-quantized",
                "targets": ["Linear"],
                "weights": {**arguments, "dynamic": False},
                "input_activations": inputs,
            }
        },
        "ignore": exclude,
        "kv_cache_scheme": None,
    }


def write_tensors(folder: Path, tensors: Tensors, shards: int = 1) -> None:
    """Saves tensors in one file, or cut into `shards` runs of about equal count with an index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_toy(
    folder: Path,
    dialect: str = "modelopt",
    activations: str = "nvfp4",
    *,
    layers: int = 2,
    shards: int = 1,
    seed: int = 0,
    edit: Callable[[Tensors], object] | None = None,
    edit_config: Callable[[dict[str, Any]], object] | None = None,
) -> Toy:
    """Writes a decoder with random codes and scales.

    Args:
        folder: created.
        dialect: "modelopt" or "compressed-tensors".
        activations: "nvfp4" stores input scales, "none" does not.
        layers: decoder layers; each has the modules of `LINEARS`.
        shards: number of files; a module's tensors may end up in two of them.
        seed: of all random values.
        edit: changes the tensors before they are saved, for damaged checkpoints.
        edit_config: changes config.json's content before it is saved.
    """
    random = torch.Generator().manual_seed(seed)

    def bytes_below(limit: int, *shape: int) -> Tensor:
        return torch.randint(0, limit, shape, generator=random, dtype=torch.uint8)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).bfloat16()

    folder.mkdir()
    toy = Toy(folder)
    toy.plain["model.embed_tokens.weight"] = floats(VOCABULARY, HIDDEN)
    tensors: Tensors = dict(toy.plain)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        norm = {f"{prefix}input_layernorm.weight": floats(HIDDEN)}
        bias = {f"{prefix}self_attn.q_proj.bias": floats(HIDDEN)}
        toy.plain |= norm | bias
        tensors |= norm | bias
        for name, (N, K) in LINEARS.items():
            module = prefix + name
            codes = bytes_below(16, N, K)
            scale_bytes = bytes_below(0x7E, N, K // 16) + 1  # 0x01..0x7E: positive, not NaN
            scalars = torch.rand(2, generator=random) * 1e-3 + 1e-5
            stored = scalars if dialect == "modelopt" else 1.0 / scalars
            multipliers = stored if dialect == "modelopt" else 1.0 / stored
            inputs = float(stored[1]) if activations == "nvfp4" else None
            tensors |= stored_module(module, codes, scale_bytes, float(stored[0]), inputs, dialect)
            toy.weights[module] = matrix(codes, scale_bytes, float(multipliers[0]))
            if activations == "nvfp4":
                toy.input_scales[module] = multipliers[1].clone()
    last = {"model.norm.weight": floats(HIDDEN), "lm_head.weight": floats(VOCABULARY, HIDDEN)}
    toy.plain |= last
    tensors |= last
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "quantization_config": quantisation_config(dialect, activations, ["lm_head"]),
    }
    if edit is not None:
        edit(tensors)
    if edit_config is not None:
        edit_config(config)
    write_tensors(folder, tensors, shards)
    (folder / "config.json").write_text(json.dumps(config))
    return toy


def expect_refusal(folder: Path, *fragments: str) -> list[str]:
    """The first problem is raised; it is also among the lines that `problems` gives.

    Every fragment is a regular expression that the message must hold, in this order.
    """
    pattern = "(?s)" + ".*".join(fragments)
    with pytest.raises(ValueError, match=pattern):
        load_checkpoint(folder)
    lines = load_checkpoint(folder, check=False).problems()
    assert any(re.search(pattern, line) for line in lines)
    return lines
