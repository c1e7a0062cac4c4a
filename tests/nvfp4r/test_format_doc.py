"""docs/format.md is held to what the code does: its tables, its example and its configurations."""

import json
import re
from pathlib import Path

import pytest
import torch

from nvfp4r import reference
from nvfp4r.checkpoint.dialects import config_block, hf_quant_config
from nvfp4r.format import NVFP4Tensor, decode_e2m1, unpack_codes
from nvfp4r.methods.rotation import rotate
from nvfp4r.quantize import divisor_for, quantize

DOCUMENT = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
PRODUCER = {"name": "reset-decoding", "version": "0.1.0"}


def section(title):
    """Text from the heading that contains `title` to the next heading of the same level."""
    start = re.search(rf"^(#+) .*{re.escape(title)}.*$", DOCUMENT, re.MULTILINE)
    assert start, f"docs/format.md has no section {title!r}"
    rest = DOCUMENT[start.end() :]
    end = re.search(rf"^#{{2,{len(start[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def table(text):
    """Cells of the first table in `text`, without its header."""
    block = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in block[0].splitlines()]
    return rows[2:]


def number(text):
    """'7 * 2^-9' -> 0.013671875"""
    value = 1.0
    for factor in text.split("*"):
        base, _, exponent = factor.strip().partition("^")
        value *= float(base) ** int(exponent or 1)
    return value


def test_e2m1_table():
    rows = table(section("E2M1"))
    values = {int(code): value for row in rows for code, value in (row[:2], row[2:])}
    assert sorted(values) == list(range(16))
    for code, value in values.items():
        assert str(float(value)) == str(reference.e2m1(code))


def test_table_of_ties():
    header, row = re.findall(r"^\| (?:tie|becomes) \|(.*)\|$", section("E2M1"), re.MULTILINE)
    ties = torch.tensor([float(cell) for cell in header.split("|")], dtype=torch.float64)
    codes = reference.encode_e2m1(ties)
    assert decode_e2m1(codes).tolist() == [float(cell) for cell in row.split("|")]


def test_e4m3_table():
    rows = [row for row in table(section("E4M3")) if ".." not in row[0]]
    assert len(rows) >= 8
    for byte, value, _ in rows:
        if value == "NaN":
            assert reference.e4m3(int(byte, 16)) != reference.e4m3(int(byte, 16))
        else:
            assert reference.e4m3(int(byte, 16)) == number(value)


def test_bytes_that_the_e4m3_table_refuses():
    refused = {row[0] for row in table(section("E4M3")) if row[2] == "refused"}
    assert refused == {"0x7F", "0x80..0xFE", "0xFF"}
    codes = torch.full((1, 8), 0x22, dtype=torch.uint8)
    for byte in range(256):
        scale = torch.tensor([[byte]], dtype=torch.uint8).view(torch.float8_e4m3fn)
        tensor = NVFP4Tensor(codes, scale, torch.tensor(1.0))
        if byte == 0 or byte == 0x7F or byte >= 0x80:
            with pytest.raises(ValueError, match="block scales"):
                tensor.validate("layer")
        else:
            tensor.validate("layer")


def test_the_block_worked_by_hand():
    text = section("One block by hand")
    scale = re.search(r"`global_scale` (\S+) = (\S+) \(divisor (\d+)\)", text)
    global_scale = torch.tensor(number(scale[1]))
    assert float(global_scale) == float(scale[2])
    assert float(divisor_for(global_scale)) == float(scale[3])

    rows = table(text)
    assert [int(row[0]) for row in rows] == list(range(16))
    weight = torch.tensor([[float(row[1]) for row in rows]])
    tensor = quantize(weight, global_scale=global_scale)

    byte, value = re.search(r"\*\*Block scale: byte (0x..), value (\d+)\.\*\*", text).groups()
    assert tensor.block_scale.view(torch.uint8).item() == int(byte, 16)
    assert tensor.block_scale.float().item() == float(value)
    before = re.search(r"`s = (\S+) / \(6 \* 2\^-9\) = (\d+\.\d+)\.\.\.`", text)
    assert float(before[1]) == weight.abs().max().item()
    assert float(before[1]) / (6 * float(global_scale)) == pytest.approx(float(before[2]), abs=0.01)
    step = float(re.search(r"One step is `\d+ \* 2\^-9 = (\S+)`", text)[1])
    assert step == float(value) * float(global_scale)

    codes = unpack_codes(tensor.codes)[0]
    assert codes.tolist() == [int(row[4]) for row in rows]
    for row, exact, code, back in zip(
        rows, weight[0].double() / step, codes, tensor.dequantize()[0], strict=True
    ):
        assert float(row[2]) == pytest.approx(float(exact), abs=5e-5)
        assert str(float(row[3])) == str(reference.e2m1(int(code)))
        assert str(float(row[5])) == str(float(back))
    packed = re.search(r"\*\*Code bytes: ([0-9A-F ]+)\.\*\*", text)[1]
    assert bytes(tensor.codes[0].tolist()) == bytes.fromhex(packed)

    truth_codes, truth_bytes, _ = reference.quantize(weight, global_scale)
    assert torch.equal(codes, truth_codes[0])
    assert torch.equal(tensor.block_scale.view(torch.uint8), truth_bytes)


def json_blocks(text):
    return [json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL)]


def test_documented_modelopt_configuration_is_what_we_write():
    config, side_file = json_blocks(section("Configuration, ModelOpt"))
    assert config["quantization_config"] == config_block("modelopt", "nvfp4", ["lm_head"], PRODUCER)
    assert side_file == hf_quant_config("nvfp4", ["lm_head"], PRODUCER)


def test_documented_compressed_tensors_configuration_is_what_we_write():
    (config,) = json_blocks(section("Configuration, compressed-tensors"))
    written = config_block("compressed-tensors", "nvfp4", ["lm_head"], PRODUCER)
    assert config["quantization_config"] == written


def test_documented_rotation_is_what_we_write_and_compute():
    (config,) = json_blocks(section("Rotated layers, compressed-tensors"))
    written = config_block("compressed-tensors", "none", ["lm_head"], {}, "hadamard16")
    (key,) = config["quantization_config"]
    assert config["quantization_config"][key] == written[key]
    signs = [[-1 if (i & j).bit_count() % 2 else 1 for j in range(16)] for i in range(16)]
    assert torch.equal(rotate(torch.eye(16)), torch.tensor(signs) / 4)
