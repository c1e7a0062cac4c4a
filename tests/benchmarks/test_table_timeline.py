"""Tables of a decode step's parts, from invented lines that are easy to add up."""

from __future__ import annotations

import pytest

from table_timeline import Timeline, timeline_table
from tests.benchmarks.e2e_lines import MACHINE, all_lines
from timeline import HEAD, LAYERS

LAYER_US = {"bf16": 3000.0, "stock": 1500.0, "nvfp4r": 1000.0}


def trace(impl, model="qwen3-32b", **more):
    """Four layers of 100 calls each, a head, attention, and what `more` says."""
    parts = {**dict.fromkeys(LAYERS, LAYER_US[impl]), HEAD: 400.0, "attention": 300.0, **more}
    same = {**MACHINE, "bench": "timeline", "impl": impl, "model": model, "batch": 1, "prompt": 512}
    busy = sum(parts.values())
    step = {"step_us": busy + 90, "busy_us": busy, "idle_us": 90.0, "waiting_us": 0.0}
    yield {**same, "part": "step", **step, "launches": 402, "steps": 15, "tpot_ms": 6.0}
    for part, us in parts.items():
        layer = part in LAYERS
        calls = 100 if layer else 1
        yield {**same, "part": part, "us": us, "idle_us": 20.0 * layer, "launches": calls}


def alone():
    """A layer of 16 x 16 takes 9, 11 and 14 us; its bytes 4.5 at 32 MB/s."""
    common = {"M": 1, "N": 16, "K": 16, "of_read": 0.5}
    lines = [{"impl": "read", "tb_per_s": 32e-6}]
    for shape in (f"{size} {layer}" for size in ("14B", "32B") for layer in LAYERS):
        for impl, us in (("nvfp4r", 9.0), ("nvfp4r_no_pdl", 11.0), ("marlin", 14.0)):
            lines.append({**common, "shape": shape, "impl": impl, "median_us": us})
    return lines


def lines(**more):
    return [*trace("bf16"), *trace("stock"), *trace("nvfp4r", **more)]


@pytest.fixture
def rows():
    return timeline_table(lines(), alone(), all_lines()).splitlines()


def test_engines_stand_side_by_side(rows):
    assert "| qkv | 3000 / 1500 / 1000 |" in rows
    assert "| **these layers** | **12000** / **6000** / **4000** |" in rows
    assert "| **all but the layers** | **700** / **700** / **700** |" in rows
    assert "| **a step** | **12790** / **6790** / **4790** |" in rows
    assert sum(MACHINE["command"] in row for row in rows) == 1


def test_a_layer_in_a_step_beside_itself_alone(rows):
    assert "| 32B o | 10.0 | 0.20 | 9.0 | 11.0 | 4.5 | 15.0 | 14.0 |" in rows


def test_what_is_left_and_whether_it_can_go(rows):
    # 400 calls of 10 us each, 9 back to back
    assert any(
        row.startswith("| our layers, over their times back to back | 400 |") for row in rows
    )
    assert "| idle before our layers | 80 | the same |" in rows
    assert "| idle elsewhere | 10 | no |" in rows
    # gate_up reaches 45 % of the bandwidth: a head of 9/32 of the bytes takes 9/32 / 0.45 = 62.5 %
    (saving,) = (row for row in rows if "a head in NVFP4 would save" in row)
    assert "| 150 |" in saving


def test_a_part_that_nobody_knows_is_listed_and_not_judged():
    rows = timeline_table(lines(_new_kernel=7.0), alone(), all_lines()).splitlines()
    assert "| _new_kernel | 0 / 0 / 7 |" in rows
    assert "| _new_kernel | 7 | not looked at |" in rows


def test_what_a_goal_leaves_to_the_layers(rows):
    # 18 ms / 2.7 and 9 / 1.5 a token; all but the layers 6 - 4 ms; 400 calls at 4.5 us at least
    (bf16,) = (row for row in rows if row.startswith("| qwen3-32b, 2.7x BF16 |"))
    (stock,) = (row for row in rows if row.startswith("| qwen3-32b, 1.5x stock |"))
    assert bf16.endswith("| 6.67 | 4.67 | 39% | 4.00 | 45% | 1.80 |")
    assert stock.endswith("| 6.00 | 4.00 | 45% | 4.00 | 45% | 1.80 |")


def test_the_newest_trace_counts_whole():
    times = Timeline([*lines(gone=5.0), *trace("nvfp4r", attention=250.0)])
    assert times.us("qwen3-32b", "nvfp4r", "attention") == 250.0
    assert "gone" not in times.parts("qwen3-32b")


def test_models_have_columns_by_size_and_engines_may_be_missing():
    others = trace("nvfp4r", "qwen3-14b")
    both = [*lines(), *others, *trace("stock", "qwen3-14b")]
    rows = timeline_table(both, alone(), all_lines()).splitlines()
    assert "| qkv | - / 1500 / 1000 | 3000 / 1500 / 1000 |" in rows
    assert "| attention | 300 | 300 | no, it is vLLM's FlashAttention |" in rows


def test_a_model_without_an_engine_to_compare_is_refused():
    with pytest.raises(ValueError, match=r"no trace of qwen3-14b with stock; run: .*--profile"):
        timeline_table([*lines(), *trace("nvfp4r", "qwen3-14b")], alone(), all_lines())
