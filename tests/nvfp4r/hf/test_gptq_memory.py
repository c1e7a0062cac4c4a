"""What a run over a model's layers keeps after each: bytes of all tensors that are alive.

For GPTQ, and for the largest inputs alone, which W4A4 by other methods needs.
"""

from __future__ import annotations

import gc
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nvfp4r.convert import weight_maxima
from nvfp4r.hf import hidden_states
from nvfp4r.hf.layers import LayerwiseModel
from nvfp4r.hf.maxima import input_maxima
from nvfp4r.hf.sequential import gptq_tensors, work_folder
from nvfp4r.selection import plan_conversion

CPU = torch.device("cpu")
LAYERS, HIDDEN, INTERMEDIATE, TOKENS = 5, 32, 64, 48
LAYER_BYTES = 4 * (4 * HIDDEN**2 + 3 * HIDDEN * INTERMEDIATE + 2 * HIDDEN)  # in float32
TEXT_BYTES = 4 * TOKENS * HIDDEN  # its hidden states between two layers
ROW_BYTES = 8 * TOKENS  # its token ids


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "source"
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def older_objects_are_left_out(source):
    """So that only tensors of a run are counted, and a search for them takes no time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def live_bytes() -> int:
    """Of storages of tensors on the CPU; what waits for the garbage collector counts."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def after_each_layer(source: Path, output: Path, method: str, texts: int) -> list[int]:
    """Bytes that the run added, after each layer but the last, which gives no hidden states.

    Args:
        method: "maxima", or one of GPTQ's.
    """
    plan = plan_conversion(source)
    maxima = weight_maxima(plan)
    gc.collect()
    before, found = live_bytes(), []
    rows = [torch.arange(TOKENS) + i for i in range(texts)]

    def progress(part: str, done: float, total: int) -> None:
        # The last text of a layer has been run and what comes of it is kept.
        if done == len(found) + 1:
            found.append(live_bytes() - before)

    if method == "maxima":
        input_maxima(plan, rows, CPU, output.parent, progress=progress)
    else:
        work = work_folder(output, plan, rows, CPU, method=method)
        gptq_tensors(plan, rows, CPU, method=method, maxima=maxima, work=work, progress=progress)
    assert len(found) == LAYERS
    return found[:-1]


@pytest.mark.parametrize("method", ["gptq", "mr-gptq"])
@pytest.mark.parametrize("texts", [1, 4])
def test_memory_does_not_grow_with_layers(source, tmp_path, method, texts):
    found = after_each_layer(source, tmp_path / "out", method, texts)
    assert found == [found[0]] * (LAYERS - 1)


def test_maxima_add_one_number_for_each_linear_layer(source, tmp_path):
    """The last result of a layer and its weights are alive there too."""
    found = after_each_layer(source, tmp_path / "out", "maxima", 4)
    assert [later - before for before, later in pairwise(found)] == [7 * 4] * (LAYERS - 2)


@pytest.mark.parametrize("method", ["gptq", "maxima"])
def test_each_text_costs_its_tokens_and_its_hidden_states(source, tmp_path, method):
    one, four = (after_each_layer(source, tmp_path / f"{n}", method, n)[0] for n in (1, 4))
    assert four - one == 3 * (TEXT_BYTES + ROW_BYTES)


@pytest.mark.parametrize("method", ["gptq", "maxima"])
def test_beyond_the_limit_a_text_costs_its_tokens_alone(source, tmp_path, monkeypatch, method):
    """Hidden states of two texts are held, however many there are."""
    monkeypatch.setattr(hidden_states, "IN_MEMORY_BYTES", 2 * TEXT_BYTES + TEXT_BYTES // 2)
    three, nine = (after_each_layer(source, tmp_path / f"{n}", method, n) for n in (3, 9))
    # The last text of a layer is alive when it is looked at, on disk or not.
    grown = [later - before for before, later in zip(three, nine, strict=True)]
    assert grown == [6 * ROW_BYTES] * (LAYERS - 1)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".work"]


def test_the_measurement_sees_layers_that_are_held(source, tmp_path, monkeypatch):
    monkeypatch.setattr(LayerwiseModel, "unload_layer", lambda self, index: None)
    found = after_each_layer(source, tmp_path / "out", "gptq", 1)
    grown = [later - before for before, later in pairwise(found)]
    assert grown == [LAYER_BYTES] * (LAYERS - 2)
