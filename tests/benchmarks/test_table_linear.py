"""Tables of linear layers: which path served which number of tokens."""

from __future__ import annotations

import pytest

from table_linear import SHOWN, linear_table

TOKENS = (*SHOWN, 128)


def lines(paths: dict[int, str]) -> list[dict]:
    """One shape at every M; `paths` as the lines tell them, nothing where they do not."""
    facts = {"date": "d", "gpu": "g", "driver": "1", "torch": "2", "vllm": "3", "git": "a"}
    common = {**facts, "command": "c", "shape": "o", "N": 64, "K": 64, "of_read": 0.5}
    found = [{"impl": "read", "tb_per_s": 4.0}]
    for M in TOKENS:
        told = {"path": paths[M]} if M in paths else {}
        for impl in ("nvfp4r", "nvfp4r_no_pdl", "marlin", "bf16"):
            own = told if impl.startswith("nvfp4r") else {}
            found.append({**common, "impl": impl, "M": M, "median_us": 2.0, **own})
    return found


@pytest.mark.parametrize(
    ("paths", "of_64", "of_128"),
    [
        ({}, "linear_medium", "unpack, then cuBLAS"),  # lines from before linear_large
        ({64: "large", 128: "large"}, "linear_large", "linear_large"),
        ({64: "medium", 128: "medium"}, "linear_medium", "linear_medium"),
        ({64: "large", 128: "unpack"}, "linear_large", "unpack, then cuBLAS"),
    ],
)
def test_a_row_names_the_path_that_its_lines_tell(paths, of_64, of_128):
    rows = linear_table(lines(paths)).splitlines()
    assert "| 8 | linear_small | 1.00x | 1.00x | 1 |" in rows
    assert f"| 64 | {of_64} | 1.00x | 1.00x | 1 |" in rows
    assert f"| 128 | {of_128} | 1.00x | 1.00x | 1 |" in rows


def test_shapes_that_took_several_paths_are_all_told():
    other = [{**line, "shape": "qkv"} for line in lines({64: "large"})[1:]]
    text = linear_table([*lines({64: "medium"}), *other])
    assert "| 64 | linear_medium or linear_large | 1.00x | 1.00x | 2 |" in text.splitlines()
