"""Our forward passes against that of transformers, quantised layers included."""

from __future__ import annotations

import copy

import pytest
import torch
from lab.pocket_reasoner.forward import StepCache, rotary_tables, step_logits, text_logits

from nvfp4r import NVFP4Linear, quantize


@pytest.fixture(scope="module", params=["plain", "none", "nvfp4"])
def model(request, toy_model):
    """The toy, as it is or with every linear layer but the head in NVFP4."""
    if request.param == "plain":
        return toy_model
    quantised = copy.deepcopy(toy_model)
    for name, module in list(quantised.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            weight = quantize(module.weight.detach())
            scale = torch.tensor(0.02) if request.param == "nvfp4" else None
            layer = NVFP4Linear(weight, input_scale=scale, activations=request.param)
            quantised.set_submodule(name, layer)
    return quantised


def random_texts(rows, length):
    return torch.randint(0, 128, (rows, length), generator=torch.Generator().manual_seed(rows))


@torch.no_grad()
def test_whole_texts(model):
    ids = random_texts(3, 40)
    found = text_logits(model, ids, rotary_tables(model, 40, torch.float32))
    torch.testing.assert_close(found, model(ids).logits, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_one_token_at_a_time_each_row_at_its_own_place(model):
    ids = random_texts(4, 30)
    expected = model(ids).logits
    cache = StepCache(model, 4, 32)
    # Row r starts r steps later; before that it feeds rubbish at position 0, as idle rows do.
    for step in range(33):
        position = (step - torch.arange(4)).clamp(0, 29)
        logits = step_logits(model, cache, ids[torch.arange(4), position], position)
        for row in range(4):
            torch.testing.assert_close(
                logits[row], expected[row, position[row]], atol=2e-4, rtol=1e-4
            )


@torch.no_grad()
def test_what_an_older_text_left_behind_is_not_seen(toy_model):
    cache = StepCache(toy_model, 1, 24)
    for text in (random_texts(1, 24), random_texts(2, 12)[1:]):
        for place in range(text.shape[1]):
            logits = step_logits(toy_model, cache, text[:, place], torch.tensor([place]))
        expected = toy_model(text).logits[:, -1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_training_compiles_without_a_break(toy_model):
    tables = rotary_tables(toy_model, 16, torch.float32)
    compiled = torch.compile(text_logits, fullgraph=True, backend="aot_eager")
    ids = random_texts(2, 16)
    torch.testing.assert_close(
        compiled(toy_model, ids, tables), text_logits(toy_model, ids, tables)
    )
