"""Activation maxima: what enters them, what must not, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nvfp4r.calibration import ActivationMaxima, calibrate, unpadded_rows
from nvfp4r.linear import NVFP4Linear
from nvfp4r.methods.rotation import hadamard16
from nvfp4r.quantize import global_scale_from_amax, quantize
from tests.nvfp4r.toy_models import linear_names, token_ids, toy_model

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def llama():
    return toy_model("llama")


def padded(row, pads, side):
    """One row with `pads` padding positions of token 0, and its mask."""
    pad = torch.zeros(pads, dtype=torch.long)
    parts = [row, pad] if side == "right" else [pad, row]
    masks = [torch.ones_like(row), pad] if side == "right" else [pad, torch.ones_like(row)]
    return {"input_ids": torch.cat(parts)[None], "attention_mask": torch.cat(masks)[None]}


@pytest.mark.parametrize("side", ["left", "right"])
def test_r7_padding_does_not_change_the_maxima(llama, side):
    names = linear_names(llama)
    row = token_ids(20)
    alone = calibrate(llama, [row], names)
    assert calibrate(llama, [padded(row, 1000, side)], names) == alone
    # The same pads without a mask are tokens like any other, and do show.
    unmasked = {"input_ids": padded(row, 1000, side)["input_ids"]}
    assert calibrate(llama, [unmasked], names) != alone


def test_a_row_is_not_affected_by_the_others_of_its_batch(llama):
    names = linear_names(llama)
    rows = token_ids(3, 20)
    mask = torch.ones_like(rows)
    mask[1, :15] = 0
    mask[2] = 0
    batch = calibrate(llama, [{"input_ids": rows, "attention_mask": mask}], names)
    singles = [calibrate(llama, [row], names) for row in (rows[0], rows[1, 15:])]
    assert batch == {name: max(single[name] for single in singles) for name in names}


def test_maxima_are_those_of_the_inputs(llama):
    """Against inputs computed by hand, where the model's structure makes that short."""
    ids = token_ids(2, 20)
    found = calibrate(llama, [ids], [Q_PROJ, "lm_head"])
    layer = llama.model.layers[0]
    with torch.inference_mode():
        q_input = layer.input_layernorm(llama.model.embed_tokens(ids))
        head_inputs = [llama.model(input_ids=row[None]).last_hidden_state for row in ids]
    assert found[Q_PROJ] == q_input.abs().max()
    # Of all positions, though the other layers only need the logits of the last one.
    assert found["lm_head"] == torch.stack(head_inputs).abs().max()
    for amax in found.values():
        assert (amax.dtype, amax.shape, amax.device.type) == (torch.float32, (), "cpu")


def test_maxima_of_rotated_inputs(llama):
    ids = token_ids(20)
    (found,) = calibrate(llama, [ids], [Q_PROJ], rotation="hadamard16").values()
    with torch.inference_mode():
        q_input = llama.model.layers[0].input_layernorm(llama.model.embed_tokens(ids[None]))
    rotated = q_input.double().unflatten(-1, (-1, 16)) @ hadamard16(torch.float64)
    assert float(found) == pytest.approx(float(rotated.abs().max()), rel=1e-6)
    assert float(found) != pytest.approx(float(q_input.abs().max()), rel=1e-2)


def test_bfloat16_models_give_float32_maxima():
    model = toy_model("llama", dtype=torch.bfloat16)
    (amax,) = calibrate(model, [token_ids(8)], [Q_PROJ]).values()
    assert amax.dtype == torch.float32
    assert amax == amax.bfloat16().float()


def test_order_progress_and_accepted_shapes(llama):
    names = [*reversed(linear_names(llama))]
    calls = []
    batches = [token_ids(5), token_ids(2, 7), {"input_ids": token_ids(1, 3)}]
    found = calibrate(llama, iter(batches), names, progress=lambda *counts: calls.append(counts))
    assert list(found) == names
    assert calls == [(1, 5), (2, 12), (3, 19), (4, 22)]


def test_the_model_is_left_as_it_was(llama):
    before = {name: value.clone() for name, value in llama.state_dict().items()}
    found = calibrate(llama, [token_ids(8)], [Q_PROJ])
    assert not any(module._forward_pre_hooks for module in llama.modules())
    assert all(torch.equal(before[name], value) for name, value in llama.state_dict().items())
    assert not found[Q_PROJ].is_inference()


def test_no_cache_is_built_and_unneeded_logits_are_left_out(llama):
    outputs = []
    with llama.register_forward_hook(lambda module, args, output: outputs.append(output)):
        calibrate(llama, [token_ids(8)], [Q_PROJ])
        calibrate(llama, [token_ids(8)], ["lm_head"])
    assert [output.logits.shape[1] for output in outputs] == [1, 8]
    assert [list(output) for output in outputs] == [["logits"]] * 2


def test_maxima_run_over_calls_and_both_signs():
    layer = nn.Linear(16, 1)
    maxima = ActivationMaxima({"layer": layer})
    with maxima:
        layer(torch.full((1, 16), 2.0))
        layer(input=torch.full((1, 16), -3.0))
        layer(torch.empty(0, 16))
    layer(torch.full((1, 16), 9.0))
    assert maxima.result() == {"layer": 3.0}


def test_hooks_go_when_the_model_fails():
    layer = nn.Linear(16, 1)
    with pytest.raises(RuntimeError, match="shapes"), ActivationMaxima({"layer": layer}):
        layer(torch.ones(1, 17))
    assert not layer._forward_pre_hooks


def test_only_one_recording_at_a_time():
    maxima = ActivationMaxima({"layer": nn.Linear(16, 1)})
    with maxima, pytest.raises(RuntimeError, match="already recording"):
        maxima.__enter__()


def test_q2_only_zeros_were_seen(caplog):
    model = toy_model("qwen2")
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.zero_()
        model.model.layers[0].self_attn.q_proj.bias.copy_(torch.arange(1, 65))
    amax = calibrate(model, [token_ids(8)], [Q_PROJ])[Q_PROJ]
    assert amax == 0
    scale = global_scale_from_amax(amax, Q_PROJ)
    assert torch.isfinite(scale)
    assert scale > 0
    assert [r.levelname for r in caplog.records if Q_PROJ in r.getMessage()] == ["WARNING"]
    source = model.get_submodule(Q_PROJ)
    layer = NVFP4Linear(
        quantize(source.weight), source.bias, input_scale=scale, activations="nvfp4"
    )
    assert torch.equal(layer(torch.zeros(2, 64)), source.bias.expand(2, 64))


class Routed(nn.Module):
    """Sends no token to `idle`, divides by zero before `second`."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 16)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.third, self.idle, self.odd = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(24, 1)
        self.divisor = 1.0

    def forward(self, input_ids):
        x = self.first(self.embed(input_ids))
        return self.third(self.second(x / self.divisor))


@pytest.fixture
def routed():
    torch.manual_seed(0)
    return Routed().eval()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no layer names"),
        (["first", "model.first"], r"^model\.first: no such module in Routed \(1 of 2 names\)"),
        (["embed"], "embed: is a Embedding, need a torch.nn.Linear"),
        (["odd"], "odd: has K=24 inputs, need a multiple of 16"),
        (["first", "idle"], r"^1 of 2 layers saw no token.*: idle\. Use more.*--calib-samples"),
    ],
)
def test_layers_that_cannot_be_calibrated(routed, names, message):
    with pytest.raises(ValueError, match=message):
        calibrate(routed, [token_ids(4) % 8], names)


@pytest.mark.parametrize(("divisor", "value"), [(0.0, "inf"), (float("nan"), "nan")])
def test_non_finite_activations_name_the_layer_where_they_entered(routed, divisor, value):
    routed.divisor = divisor
    rows = []
    with pytest.raises(ValueError, match=rf"^second: its input holds {value}.*2 of 3 layers"):
        calibrate(
            routed,
            [token_ids(2, 4) % 8],
            ["third", "first", "second"],
            progress=lambda row, _: rows.append(row),
        )
    assert rows == []  # told after the first row, not at the end
    assert not any(module._forward_pre_hooks for module in routed.modules())


def test_training_mode_is_refused(routed):
    with pytest.raises(ValueError, match=r"training mode.*model\.eval\(\)"):
        calibrate(routed.train(), [token_ids(4) % 8], ["first"])


@pytest.mark.parametrize(
    "batches",
    [[], [{"input_ids": token_ids(1, 4), "attention_mask": torch.zeros(1, 4, dtype=torch.long)}]],
)
def test_no_token_at_all(routed, batches):
    with pytest.raises(ValueError, match=r"no token at all.*--calib-data"):
        calibrate(routed, batches, ["first"])


ONES = torch.ones(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (ONES.float(), TypeError, "dtype torch.float32, need integer"),
        (ONES.bool(), TypeError, "dtype torch.bool, need integer"),
        (ONES[None], ValueError, r"shape \[1, 2, 3\], need"),
        ({"attention_mask": ONES}, ValueError, r"keys \['attention_mask'\], need input_ids"),
        ({"input_ids": ONES, "attention_mask": ONES[:1]}, ValueError, r"\[1, 3\], need \[2, 3\]"),
        ({"input_ids": ONES, "attention_mask": 2 * ONES}, ValueError, "other than 0 and 1"),
    ],
)
def test_batches_that_are_refused(batch, error, message):
    with pytest.raises(error, match=message):
        list(unpadded_rows(batch))


def test_rows_are_stripped_and_empty_ones_left_out():
    ids = torch.tensor([[0, 5, 6], [7, 8, 0], [0, 0, 0]], dtype=torch.int32)
    mask = torch.tensor([[False, True, True], [True, True, False], [False, False, False]])
    rows = list(unpadded_rows({"input_ids": ids, "attention_mask": mask}))
    assert [row.tolist() for row in rows] == [[5, 6], [7, 8]]
    assert {row.dtype for row in rows} == {torch.int64}
    assert list(unpadded_rows(torch.empty(0, dtype=torch.long))) == []
