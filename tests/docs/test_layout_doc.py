"""docs/layout.md is held to what packing does: its formulas, its tables and its example."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
import torch

from nvfp4r import reference
from nvfp4r.format import unpack_codes
from nvfp4r.packed import pack
from tests.nvfp4r.on_host import ArrangeOnHost
from tests.nvfp4r.packed_by_hand import (
    FACTORS,
    ORDERS,
    decode_scales,
    decode_word,
    half_value,
    matrix,
    random_matrix,
)

DOCUMENT = (Path(__file__).parents[2] / "docs" / "layout.md").read_text(encoding="utf-8")
N, K, J = 32, 256, 2


def section(number):
    text = re.search(rf"^## {number}\. .*?(?=^## |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert text, f"docs/layout.md has no section {number}"
    return text[0]


def tables(text):
    """Every table in `text` as rows of cells without backticks and without the header."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [
        [[c.strip().replace("`", "") for c in row.strip("|").split("|")] for row in b.splitlines()]
        for b in blocks
    ]


def number(text):
    """'-3 * 2^-14' as a float"""
    value = 1.0
    for factor in text.split("*"):
        base, _, exponent = factor.strip().partition("^")
        value *= float(base) ** int(exponent or 1)
    return value


def compiled(formula):
    """Integer arithmetic of the document, in which / is the integer division."""
    assert re.fullmatch(r"[a-zA-Z0-9 ()+*/%]+", formula), formula
    return compile(formula.replace("/", "//"), formula, "eval")


def planes(order):
    """(S, B) of every plane."""
    rows = tables(section(2))[1][2:]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    return [(int(row[3]), int(row[4 + ORDERS.index(order)])) for row in rows]


class Locator:
    """The formulas of section 2 for a matrix of J column tiles."""

    def __init__(self, order):
        self.planes = planes(order)
        self.formulas = [(name, compiled(text)) for name, text, _ in tables(section(2))[0][2:]]

    def __call__(self, n, k):
        """Every name of the table for element (n, k)."""
        names = {"__builtins__": {}, "n": n, "k": k, "J": J}
        for name, formula in self.formulas:
            if name == "sign":
                names["S"], names["B"] = self.planes[names["p"]]
            names[name] = eval(formula, names)
        return names


def little_endian(memory, at):
    return int.from_bytes(bytes(memory[at : at + 4]), "little")


@pytest.mark.parametrize("order", ORDERS)
def test_the_formulas_find_every_code_and_scale(order):
    weight = random_matrix(N, K)
    codes = unpack_codes(weight.codes).tolist()
    scales = weight.block_scale.float().tolist()
    memory = pack(weight, order).tiles.flatten().tolist()
    locate, seen = Locator(order), set()
    for n, k in product(range(N), range(K)):
        at = locate(n, k)
        word = little_endian(memory, at["word"])
        sign, magnitude = word >> at["sign"] & 1, word >> at["magnitude"] & 7
        assert 8 * sign + magnitude == codes[n][k]
        byte = memory[at["scale"]]
        value = (1 + byte % 8 / 8) * 2.0 ** (byte // 8 - 22) if byte else 0.0
        assert value == scales[n][k // 16]
        seen |= {(at["word"], at["sign"])}
        seen |= {(at["word"], at["magnitude"] + bit) for bit in range(3)}
    assert len(seen) == 4 * N * K


@pytest.mark.parametrize(("order", "lowest"), [("f16", 9), ("bf16", 6)])
@pytest.mark.parametrize("odd", [0, 1])
def test_the_planes_are_those_of_decode_word(order, lowest, odd):
    """A word with one bit set decodes to one bit, in the register and column of the table."""
    for plane, (sign, magnitude) in enumerate(planes(order)):
        moves = {sign: 15} | {magnitude + bit: lowest + bit for bit in range(3)}
        for stored, decoded in moves.items():
            expected = [0, 0, 0, 0]
            expected[plane] = 1 << (16 * odd + decoded)
            assert decode_word(1 << (16 * odd + stored), order) == expected


def test_the_table_of_scale_bytes():
    rows = tables(section(3))[0][2:]
    assert len(rows) >= 7
    for e4m3, value, e5m3 in rows:
        assert reference.e4m3(int(e4m3, 16)) == number(value)
        codes = torch.zeros(1, 16, dtype=torch.uint8)
        packed = pack(matrix(codes, torch.tensor([[int(e4m3, 16)]])), "f16")
        assert packed.tiles[0, 0, 1024].item() == int(e5m3, 16)


def test_the_table_of_decoding():
    rows = tables(section(4))[0][2:]
    assert [row[0] for row in rows] == ORDERS
    for order, code_bits, code_factor, scale_bits, scale_factor, factor in rows:
        lowest = int(re.fullmatch(r"sign at 15, magnitude at \d+\.\.(\d+)", code_bits)[1])
        for code in range(16):
            bits = (code >> 3) << 15 | (code & 7) << lowest
            assert half_value(bits, order) == reference.e2m1(code) * number(code_factor)
        shift, add = re.fullmatch(r"\(?E << (\d+)\)?(?: \+ (0x\w+))?", scale_bits).groups()
        for byte in range(0x68, 0xF7):
            value = (1 + byte % 8 / 8) * 2.0 ** (byte // 8 - 22)
            bits = (byte << int(shift)) + int(add or "0", 16)
            assert half_value(bits, order) == value * number(scale_factor)
            assert decode_scales(byte, 0, order) & 0xFFFF == bits
        assert number(code_factor) * number(scale_factor) * float(factor) == 1.0
        assert FACTORS[order] == float(factor)


def test_the_element_worked_by_hand():
    text = section(6)
    n, k = map(int, re.search(r"w\[(\d+), (\d+)\] of a 32 x 256 matrix", text).groups())
    code, value = map(int, re.search(r"Its code is (\d+) \((-?\d+)\)", text).groups())
    scale, e4m3 = re.search(r"block scale (\d+) \(E4M3 byte (0x..)\)", text).groups()
    assert reference.e2m1(code) == value
    assert reference.e4m3(int(e4m3, 16)) == int(scale)

    split, words, decoded = tables(text)
    at = Locator("f16")(n, k)
    for name, got in zip(split[0], split[2], strict=True):
        assert int(got) == at[name]
    steps = re.findall(r"^    (\w+) += (.+?) += (\d+)$", text, re.MULTILINE)
    assert [step[0] for step in steps] == ["tile", "word", "scale"]
    for name, arithmetic, result in steps:
        assert eval(compiled(arithmetic)) == int(result) == at[name]

    codes = torch.zeros(N, K, dtype=torch.uint8)
    codes[n, k] = code
    scale_bytes = torch.full((N, K // 16), 0x38)
    scale_bytes[n, k // 16] = int(e4m3, 16)
    scale_at, scale_byte = re.search(r"Byte (\d+) holds (0x..)\.", text).groups()
    for row, values in zip(words[2:], decoded[2:], strict=True):
        order = row[0]
        assert order == values[0]
        memory = pack(matrix(codes, scale_bytes), order).tiles.flatten().tolist()
        at = Locator(order)(n, k)
        assert int(row[1]) == at["sign"]
        assert row[2] == f"{at['magnitude'] + 2}..{at['magnitude']}"
        sign_byte, sign_bit = map(int, row[3].split(", "))
        magnitude_byte, high, low = map(int, re.findall(r"\d+", row[4]))
        assert memory[sign_byte] >> sign_bit & 1 == code >> 3
        assert high == low + 2
        assert memory[magnitude_byte] >> low & 7 == code & 7
        word = little_endian(memory, at["word"])
        assert word == int(row[5], 16)
        others = [b for tile in range(2 * J) for b in range(1152 * tile, 1152 * tile + 1024)]
        assert {b for b in others if memory[b]} == {sign_byte, magnitude_byte}
        assert memory[int(scale_at)] == int(scale_byte, 16)

        bits = decode_word(word, order)[at["p"]] >> 16 * at["e"] & 0xFFFF
        assert bits == int(values[1], 16)
        assert half_value(bits, order) == number(values[2])
        lane_scales = little_endian(memory, at["tile"] + 1024 + 4 * at["l"])
        scale_bits = decode_scales(lane_scales, at["h"], order) >> 16 * at["u"] & 0xFFFF
        assert scale_bits == int(values[3], 16)
        assert half_value(scale_bits, order) == number(values[4])
        scaled = half_value(bits, order) * half_value(scale_bits, order)
        assert scaled == float(values[5])
        assert scaled * FACTORS[order] == float(values[6]) == value * int(scale)


@pytest.fixture(scope="module")
def arrange(tmp_path_factory):
    return ArrangeOnHost(tmp_path_factory.mktemp("host"))


@pytest.mark.parametrize(("M", "K"), [(1, 16), (17, 208)])
def test_the_formula_finds_every_activation(arrange, M, K):
    x = torch.arange(1, M * K + 1, dtype=torch.int16).view(M, K)
    memory = arrange(x.view(torch.float16)).view(torch.int16).flatten().tolist()
    formulas = [(name, compiled(text)) for name, text, _ in tables(section(7))[0][2:]]
    for m, k in product(range(M), range(K)):
        names = {"__builtins__": {}, "m": m, "k": k, "Q": -(-M // 8)}
        for name, formula in formulas:
            names[name] = eval(formula, names)
        half, odd = divmod(names["value"], 2)
        assert odd == 0
        assert memory[half] == x[m, k]
        memory[half] = 0
    assert not any(memory)


def test_the_slots_of_wgmma_are_those_of_decode_word(arrange):
    """Step w takes slots 2t, 2t+1 and 2t+8, 2t+9 of lane t's word w."""
    rows = tables(section(7))[1][2:]
    assert len(rows) == 4
    ramp = arrange(torch.arange(64, dtype=torch.int16).view(1, 64).view(torch.float16))
    pieces = ramp.view(torch.int16).view(4, 2, 8, 8)[:, :, 0]  # of token 0
    for w, low, high in rows:
        slots = [int(column) for column in f"{low}, {high}".split(",")]
        assert slots == pieces[int(w)].flatten().tolist()
        for t in range(4):
            held = [slots[i] for i in (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)]
            first = 16 * t + 4 * int(w)
            assert held == list(range(first, first + 4))


def test_the_descriptor(arrange):
    rows = tables(section(7))[2][2:]
    assert [row[0] for row in rows] == ["0..13", "16..29", "32..45", "62..63"]
    for stage in (0, 1024, 227 * 1024 - 1024):
        start, *offsets = arrange.offsets(stage)
        assert start == stage
        assert offsets == [int(rows[1][2]), int(rows[2][2]), 0]
