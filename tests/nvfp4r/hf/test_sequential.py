"""GPTQ over whole toy models: against a plain model that is quantised layer by layer in the open,
and what is kept of a run that was ended."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nvfp4r.calibration import calibrate
from nvfp4r.checkpoint import load_checkpoint
from nvfp4r.convert import convert, weight_maxima
from nvfp4r.hf import hidden_states, load_model
from nvfp4r.hf.layers import LayerwiseModel
from nvfp4r.hf.sequential import check_architecture, finished_records, gptq_tensors, work_folder
from nvfp4r.methods import METHODS
from nvfp4r.methods.gptq import HessianSum, factorise, quantize_gptq
from nvfp4r.methods.rotation import rotate
from nvfp4r.quantize import global_scale_from_amax, quantize
from nvfp4r.selection import plan_conversion
from tests.nvfp4r.toy_models import linear_names, token_ids, toy_model

CPU = torch.device("cpu")
ROWS = [token_ids(90), token_ids(3), token_ids(60)]
UNITS = [
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    ["self_attn.o_proj"],
    ["mlp.gate_proj", "mlp.up_proj"],
    ["mlp.down_proj"],
]


@pytest.fixture(params=["llama", "qwen3"])
def source(request, tmp_path):
    toy_model(request.param, tied=request.param == "qwen3").save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def llama(tmp_path):
    toy_model("llama").save_pretrained(tmp_path / "source")
    return tmp_path / "source"


class EndedError(Exception):
    """Stands for whatever ends a run."""


def run(source, output, method="gptq", *, rows=ROWS, end_at=None, head=False, maxima=None, **more):
    """One run, like the command's; `end_at` ends it once so many layers are done."""
    plan = plan_conversion(source, quantise_head=head)
    check_architecture(plan)
    work = work_folder(output, plan, rows, CPU, method=method, **more)
    steps = []

    def progress(part, done, total):
        steps.append((part, done, total))
        if end_at is not None and done > end_at:
            raise EndedError

    stored, amax = gptq_tensors(
        plan,
        rows,
        CPU,
        method=method,
        maxima=maxima or weight_maxima(plan, method=method),
        work=work,
        progress=progress,
        **more,
    )
    made = {module: stored(info.name, None) for module, info in plan.quantised.items()}
    return made, amax, work, steps


def same(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        for field in ("codes", "block_scale", "global_scale"):
            ours, other = (
                getattr(x, field).reshape(-1).view(torch.uint8) for x in (tensor, second[name])
            )
            assert torch.equal(ours, other), f"{name}.{field}"


def in_the_open(model: nn.Module, rotated: bool):
    """The same with plain hooks on a plain model that is always whole, each layer rounded alone."""
    turn = rotate if rotated else lambda x: x
    made = {}
    for i, layer in enumerate(model.model.layers):
        factors = {}
        for unit in UNITS:
            linear = layer.get_submodule(unit[-1])  # any member: they read the same
            total = HessianSum(linear.in_features, name=unit[0])
            hook = linear.register_forward_pre_hook(
                lambda module, args, total=total: total.add(turn(args[0]))
            )
            with torch.inference_mode():
                for row in ROWS:
                    model(row.unsqueeze(0))
            hook.remove()
            factors[unit[0]] = factorise(total)
        for unit in UNITS:
            linears = [layer.get_submodule(name) for name in unit]
            turned = [turn(linear.weight.detach()) for linear in linears]
            scale = global_scale_from_amax(max(float(w.abs().max()) for w in turned))
            for name, linear, weight in zip(unit, linears, turned, strict=True):
                quantised = quantize_gptq(weight, factors[unit[0]], global_scale=scale)
                made[f"model.layers.{i}.{name}"] = quantised
                linear.weight.data.copy_(turn(quantised.dequantize()))
    return made


@pytest.mark.parametrize("method", ["gptq", "mr-gptq"])
def test_layers_see_what_the_quantised_ones_before_leave(source, tmp_path, method):
    kind = "qwen3" if "q_norm" in str(load_file(source / "model.safetensors").keys()) else "llama"
    made, amax, work, steps = run(source, tmp_path / "out", method)
    assert amax is None
    truth = in_the_open(toy_model(kind, tied=kind == "qwen3"), METHODS[method].rotation is not None)
    same(made, {name: truth[name] for name in made})
    assert work.path == tmp_path / "out.work"
    done = [done for _, done, _ in steps]
    assert done == sorted(done)
    assert steps[-1] == ("model.layers.1", 2.0, 2)


@pytest.mark.parametrize("method", ["gptq", "mr-gptq"])
@pytest.mark.parametrize("end_at", [0.2, 1.2, 1.9])
def test_a_run_that_was_ended_goes_on_to_the_same_bytes(llama, tmp_path, method, end_at):
    more = {"activations": "nvfp4"}
    whole, amax, _, _ = run(llama, tmp_path / "whole", method, **more)
    with pytest.raises(EndedError):
        run(llama, tmp_path / "out", method, end_at=end_at, **more)
    kept = sorted(file.name for file in (tmp_path).glob("out.work/*"))
    assert kept == ([] if end_at < 1 else ["00000.safetensors", "settings.json"])
    resumed, amax_resumed, work, _ = run(llama, tmp_path / "out", method, **more)
    same(whole, resumed)
    assert amax == amax_resumed
    for file in (tmp_path / "whole.work").glob("*.safetensors"):
        assert load_file(file).keys() == load_file(work.path / file.name).keys()


@pytest.mark.parametrize("method", ["gptq", "mr-gptq"])
@pytest.mark.parametrize("in_memory", [0, 90 * 64 * 4])
def test_hidden_states_on_disk_change_nothing(llama, tmp_path, monkeypatch, method, in_memory):
    """All of them, or all but the first text's; in a run that was ended, too."""
    more = {"activations": "nvfp4", "head": True}
    whole, amax, _, _ = run(llama, tmp_path / "whole", method, **more)
    monkeypatch.setattr(hidden_states, "IN_MEMORY_BYTES", in_memory)
    with pytest.raises(EndedError):
        run(llama, tmp_path / "out", method, end_at=1.7, **more)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "whole.work", "out.work"}
    on_disk, amax_on_disk, _, _ = run(llama, tmp_path / "out", method, **more)
    same(whole, on_disk)
    assert amax == amax_on_disk
    assert {path.name for path in tmp_path.iterdir()} == {"source", "whole.work", "out.work"}


def test_a_disk_without_room_is_refused_before_a_weight_is_read(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(hidden_states, "IN_MEMORY_BYTES", -(1 << 60))
    monkeypatch.setattr(LayerwiseModel, "load_frame", lambda self: pytest.fail("read weights"))
    with pytest.raises(OSError, match="the calibration texts' hidden states need"):
        run(llama, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_finished_run_reads_no_model_again(llama, tmp_path, monkeypatch):
    first, _, _, _ = run(llama, tmp_path / "out")

    def refuse(self):
        raise AssertionError("the model was read again")

    monkeypatch.setattr(LayerwiseModel, "load_frame", refuse)
    same(first, run(llama, tmp_path / "out")[0])


def test_one_layer_has_weights_at_a_time(llama, tmp_path, monkeypatch):
    held, most = set(), []
    load, unload = LayerwiseModel.load_layer, LayerwiseModel.unload_layer
    monkeypatch.setattr(
        LayerwiseModel,
        "load_layer",
        lambda self, i: (held.add(i), most.append(len(held)), load(self, i)),
    )
    monkeypatch.setattr(
        LayerwiseModel, "unload_layer", lambda self, i: (held.discard(i), unload(self, i))
    )
    run(llama, tmp_path / "out")
    assert most == [1, 1]


@pytest.mark.parametrize("method", ["gptq", "mr-gptq"])
def test_input_maxima_are_those_of_the_quantised_model(llama, tmp_path, method):
    """As calibration of the finished checkpoint, activations left alone, finds them."""
    made, amax, _, _ = run(llama, tmp_path / "out", method, activations="nvfp4")
    model = toy_model("llama")
    rotation = METHODS[method].rotation
    for name, tensor in made.items():
        weight = tensor.dequantize()
        model.get_submodule(name).weight.data.copy_(rotate(weight) if rotation else weight)
    found = calibrate(model, ROWS, list(made), rotation=rotation)
    for name, value in amax.items():
        torch.testing.assert_close(value, found[name], rtol=1e-5, atol=0)


def test_the_checkpoint_runs(llama, tmp_path):
    plan = plan_conversion(llama)
    work = work_folder(tmp_path / "out", plan, ROWS, CPU, method="mr-gptq")
    maxima = weight_maxima(plan, method="mr-gptq")
    stored, _ = gptq_tensors(plan, ROWS, CPU, method="mr-gptq", maxima=maxima, work=work)
    convert(
        plan,
        tmp_path / "out",
        maxima,
        method="mr-gptq",
        stored=stored,
        dialect="compressed-tensors",
    )
    checkpoint = load_checkpoint(tmp_path / "out")
    assert checkpoint.rotation == "hadamard16"
    row = token_ids(1, 12)
    with torch.inference_mode():
        ours = load_model(tmp_path / "out", dtype=torch.float32)(row).logits
        plain = toy_model("llama")(row).logits
    assert 0 < float((ours - plain).norm() / plain.norm()) < 0.3


def test_the_output_head_is_rounded_last(llama, tmp_path):
    made, amax, work, steps = run(llama, tmp_path / "out", head=True, activations="nvfp4")
    assert steps[-1] == ("head", 3.0, 3)
    model = toy_model("llama")
    for name in linear_names(model):
        model.get_submodule(name).weight.data.copy_(made[name].dequantize())
    total = HessianSum(64, name="lm_head")
    model.lm_head.register_forward_pre_hook(lambda module, args: total.add(args[0]))
    with torch.inference_mode():
        for row in ROWS:
            model(row.unsqueeze(0))
    weight = model.lm_head.weight.detach()
    truth = quantize_gptq(
        weight, factorise(total), global_scale=global_scale_from_amax(float(weight.abs().max()))
    )
    same({"lm_head": made["lm_head"]}, {"lm_head": truth})
    assert finished_records(work)[-1]["modules"] == ["lm_head"]
    assert float(amax["lm_head"]) > 0


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({"method": "mr-gptq"}, "another --method: gptq, now mr-gptq"),
        ({"damping": 0.02}, "another --damping: 0.01, now 0.02"),
        ({"activations": "nvfp4"}, "another --activations: none, now nvfp4"),
        ({"rows": ROWS[:2]}, "another number of calibration texts: 3, now 2"),
        ({"rows": [ROWS[0], ROWS[1], ROWS[2].flip(0)]}, "another sequence of calibration tokens"),
        ({"head": True}, "another --exclude"),
    ],
)
def test_other_settings_are_refused_by_name(llama, tmp_path, more, shown):
    with pytest.raises(EndedError):
        run(llama, tmp_path / "out", end_at=1.2)
    with pytest.raises(ValueError, match="holds finished layers of a command with") as error:
        run(llama, tmp_path / "out", **more)
    assert shown in str(error.value)


def test_another_model_in_the_same_place_is_refused(llama, tmp_path):
    with pytest.raises(EndedError):
        run(llama, tmp_path / "out", end_at=1.2)
    shutil.rmtree(llama)
    toy_model("llama").save_pretrained(llama)
    with pytest.raises(ValueError, match="another state of the model's files"):
        run(llama, tmp_path / "out")


def edit(source, name, change):
    tensors = load_file(source / "model.safetensors")
    change(tensors[name])
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


def test_inputs_of_zero_mean_rounding_to_nearest(llama, tmp_path, caplog):
    edit(llama, "model.layers.1.input_layernorm.weight", lambda t: t.zero_())
    made, _, work, _ = run(llama, tmp_path / "out")
    name = "model.layers.1.self_attn.{q_proj,k_proj,v_proj}"
    assert f"{name}: had inputs of zero only in calibration; it is rounded to near" in caplog.text
    plan = plan_conversion(llama)
    scale = global_scale_from_amax(weight_maxima(plan)["model.layers.1.self_attn.q_proj"])
    for member in UNITS[0]:
        module = f"model.layers.1.{member}"
        weight = plan.tensors.get(f"{module}.weight")
        same({module: made[module]}, {module: quantize(weight, global_scale=scale)})
    nearest = [r["modules"] for r in finished_records(work) if r["rounded_to_nearest"]]
    # Values of zero leave o_proj without inputs too.
    assert nearest == [
        [f"model.layers.1.{member}" for member in UNITS[0]],
        ["model.layers.1.self_attn.o_proj"],
    ]


def test_nan_in_calibration_is_refused_by_name(llama, tmp_path):
    edit(llama, "model.layers.1.post_attention_layernorm.weight", lambda t: t[3].fill_(torch.nan))
    plan = plan_conversion(llama)
    maxima = dict.fromkeys(plan.quantised, 1.0)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.\{gate_proj,up_proj\}: 90 of 5760 cali"):
        run(llama, tmp_path / "out", maxima=maxima)


def test_few_tokens_are_said_once(llama, tmp_path, caplog):
    rows = [token_ids(70)]
    _, _, work, _ = run(llama, tmp_path / "out", rows=rows)
    assert caplog.text.count("calibration has 70 tokens, fewer than these layers") == 1
    assert "model.layers.*.mlp.down_proj x 2" in caplog.text
    singular = {r["modules"][0] for r in finished_records(work) if r["singular"]}
    assert singular >= {f"model.layers.{i}.mlp.down_proj" for i in (0, 1)}
    assert "down_proj: the Hessian" not in caplog.text
    with pytest.raises(ValueError, match="calibration got no token at all"):
        run(llama, tmp_path / "none", rows=[torch.tensor([], dtype=torch.int64)])
