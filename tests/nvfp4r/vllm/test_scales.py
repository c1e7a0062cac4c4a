"""Scales of fused layers, before anything merges them."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from nvfp4r.vllm.scales import input_scale, row_scales, shard_names

NAN = math.nan
NAMES = ["q.weight_scale_2", "k.weight_scale_2", "v.weight_scale_2"]


def test_a2_every_row_keeps_the_scale_of_its_part():
    gate, up = 3.85e-5, 4.83e-5
    found = row_scales(torch.tensor([gate, up]), [2, 3], ["gate", "up"], stores_divisors=False)
    assert torch.equal(found, torch.tensor([gate, gate, up, up, up]))
    assert float(found[-1] / found[0]) == pytest.approx(1.2545, abs=1e-3)


def test_a1_divisors_become_multipliers():
    found = row_scales(torch.tensor([3584.0, 4.0]), [1, 2], ["q", "k"], stores_divisors=True)
    assert torch.equal(found, 1.0 / torch.tensor([3584.0, 4.0, 4.0]))


@pytest.mark.parametrize("stores_divisors", [False, True])
def test_a3_a_single_scale_in_the_first_slot_is_that_of_the_whole_layer(stores_divisors):
    stored = torch.tensor([0.25, NAN, NAN])
    found = row_scales(stored, [4, 2, 2], NAMES, stores_divisors)
    assert torch.equal(found, torch.full((8,), 4.0 if stores_divisors else 0.25))
    assert float(input_scale(stored, NAMES, stores_divisors)) == float(found[0])


@pytest.mark.parametrize(
    ("slots", "missing"),
    [
        ([NAN, NAN, NAN], "q.weight_scale_2, k.weight_scale_2, v.weight_scale_2"),
        ([0.5, 0.5, NAN], "v.weight_scale_2"),
        ([NAN, 0.5, 0.5], "q.weight_scale_2"),
    ],
)
def test_a4_a_scale_that_was_never_loaded_is_named(slots, missing):
    with pytest.raises(ValueError, match=f"global_scale missing for {missing};"):
        row_scales(torch.tensor(slots), [1, 1, 1], NAMES, stores_divisors=False)
    with pytest.raises(ValueError, match=f"^{missing} missing, but activations"):
        input_scale(torch.tensor(slots), NAMES, stores_divisors=False)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, 1e-45])
@pytest.mark.parametrize("read", [row_scales, input_scale])
def test_a4_a_scale_that_cannot_be_is_named(value, read):
    arguments = ([1, 1],) if read is row_scales else ()
    stores_divisors = value == 1e-45  # its reciprocal is infinite
    kind = "divisor" if stores_divisors else "multiplier"
    with pytest.raises(ValueError, match=f"^up is .*, need a finite {kind} > 0"):
        read(torch.tensor([1.0, value]), *arguments, ["gate", "up"], stores_divisors)


def test_input_scales_that_differ_give_the_largest_and_a_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="vllm.nvfp4r"):
        found = input_scale(torch.tensor([0.5, 2.0]), ["gate", "up"], stores_divisors=True)
    assert float(found) == 2.0
    assert "gate, up differ (2, 0.5)" in caplog.text


@pytest.mark.parametrize(
    ("layer", "members", "count", "names"),
    [
        ("a.qkv_proj", ["q_proj", "k_proj"], 2, ("a.q_proj", "a.k_proj")),
        ("a.o_proj", None, 1, ("a.o_proj",)),
        ("fused", ["x", "y"], 3, ("fused[0]", "fused[1]", "fused[2]")),
    ],
)
def test_names_of_what_a_layer_is_fused_from(layer, members, count, names):
    assert shard_names(layer, members, count) == names
