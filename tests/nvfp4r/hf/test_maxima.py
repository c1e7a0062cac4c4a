"""Largest inputs found layer by layer, against those of the model that is run as a whole.

Equal bit for bit: a layer of a model run alone does the same arithmetic on the same numbers.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM

from nvfp4r.calibration import calibrate
from nvfp4r.hf import hidden_states
from nvfp4r.hf.layers import LayerwiseModel, NotLayerwiseError
from nvfp4r.hf.maxima import input_maxima
from nvfp4r.selection import plan_conversion
from tests.nvfp4r.hf.test_layers import MODELS
from tests.nvfp4r.toy_models import VOCAB, token_ids, toy_model

CPU = torch.device("cpu")
ROWS = [token_ids(9), token_ids(0), token_ids(2), token_ids(30)]


@pytest.fixture
def llama(tmp_path):
    toy_model("llama").save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def both(folder, *, rows=ROWS, rotation=None, **options):
    """Ours, and the whole model's."""
    plan = plan_conversion(folder, **options)
    ours = input_maxima(plan, rows, CPU, folder.parent, rotation=rotation)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return ours, calibrate(whole, rows, list(plan.quantised), rotation=rotation)


@pytest.mark.parametrize("kind", MODELS)
def test_maxima_are_those_of_the_whole_model(tmp_path, kind):
    torch.manual_seed(0)
    MODELS[kind]().save_pretrained(tmp_path / "source")
    ours, whole = both(tmp_path / "source")
    assert list(ours) == list(whole)
    assert ours == whole
    assert len(set(map(float, ours.values()))) > len(ours) // 2  # layers are told apart


@pytest.mark.parametrize("in_memory", [0, 1 << 30])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("rotation", [None, "hadamard16"])
def test_rotation_head_and_disk(llama, monkeypatch, rotation, head, in_memory):
    monkeypatch.setattr(hidden_states, "IN_MEMORY_BYTES", in_memory)
    ours, whole = both(llama, rotation=rotation, quantise_head=head)
    assert ours == whole
    assert ("lm_head" in ours) == head
    assert [path.name for path in llama.parent.iterdir()] == ["source"]


def test_layers_without_anything_to_quantise_are_run_only_on_the_way(llama, monkeypatch):
    loaded = []
    load = LayerwiseModel.load_layer
    monkeypatch.setattr(
        LayerwiseModel, "load_layer", lambda self, i: (loaded.append(i), load(self, i))
    )
    ours, whole = both(llama, exclude=["model.layers.0.*"])
    assert ours == whole
    assert loaded == [0, 1]
    loaded.clear()
    ours, whole = both(llama, exclude=["model.layers.1.*"])
    assert ours == whole
    assert loaded == [0]


def test_progress_counts_layers(llama):
    steps = []
    plan = plan_conversion(llama, quantise_head=True)
    rows = [token_ids(4), token_ids(5)]
    input_maxima(plan, rows, CPU, llama, progress=lambda *step: steps.append(step))
    assert steps == [
        ("model.layers.0", 0.5, 3),
        ("model.layers.0", 1.0, 3),
        ("model.layers.1", 1.5, 3),
        ("model.layers.1", 2.0, 3),
        ("lm_head", 2.5, 3),
        ("lm_head", 3.0, 3),
    ]


def edit(folder, name, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_zeros_are_a_maximum_of_zero(llama):
    edit(llama, "model.layers.1.input_layernorm.weight", lambda t: t.zero_())
    ours, whole = both(llama)
    assert ours == whole
    assert float(ours["model.layers.1.self_attn.k_proj"]) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_layer_that_nan_enters_first_is_named(llama, value):
    """gate_proj runs before down_proj, which the file names first."""
    edit(llama, "model.layers.1.post_attention_layernorm.weight", lambda t: t[3].fill_(value))
    plan = plan_conversion(llama)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.gate_proj: its calibration inp"):
        input_maxima(plan, [token_ids(4)], CPU, llama)


def test_no_token_is_refused(llama):
    with pytest.raises(ValueError, match="calibration got no token at all"):
        input_maxima(plan_conversion(llama), [token_ids(0)], CPU, llama)


def test_layers_that_give_more_than_hidden_states_are_told_from_other_errors(tmp_path):
    """Its masks and the attention it gives back belong to the whole model."""
    config = BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4)
    BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    plan = plan_conversion(tmp_path / "bloom")
    with pytest.raises(NotLayerwiseError, match="BloomBlock gives more than its hidden states"):
        input_maxima(plan, ROWS, CPU, tmp_path)


def test_a_disk_without_room_is_refused_before_a_weight_is_read(llama, monkeypatch):
    monkeypatch.setattr(hidden_states, "IN_MEMORY_BYTES", -(1 << 60))
    monkeypatch.setattr(LayerwiseModel, "load_frame", lambda self: pytest.fail("read weights"))
    with pytest.raises(OSError, match="the calibration texts' hidden states need") as error:
        input_maxima(plan_conversion(llama), ROWS, CPU, llama)
    assert f"{(1 << 60) + 41 * 64 * 4:,} bytes" in str(error.value)
