"""load_model of rotated checkpoints: every layer, whole models, and what a copy of them keeps."""

from __future__ import annotations

import copy

import pytest
import torch

from nvfp4r import reference
from nvfp4r.checkpoint import load_checkpoint
from nvfp4r.checkpoint.writer import save_checkpoint
from nvfp4r.format import NVFP4Tensor
from nvfp4r.hf import load_model
from nvfp4r.linear import NVFP4Linear
from nvfp4r.methods.rotation import quantize_rotated, rotate
from nvfp4r.quantize import global_scale_from_amax
from tests.nvfp4r.packed_truth import PATH, assert_linear, assert_logits
from tests.nvfp4r.rotated_truth import turn
from tests.nvfp4r.toy_models import config_of, linear_names, token_ids, toy_model

ROTATION = "hadamard16"
HIDDEN_MOST = 96  # the largest K of a toy


def save_rotated(model, folder):
    """Writes a W4A4 checkpoint of rotated weights and returns its tensors and input scales."""
    names = linear_names(model)
    tensors = dict(model.state_dict())
    for name in names:
        tensors[f"{name}.weight"] = quantize_rotated(tensors[f"{name}.weight"], name=name)
    scales = {name: global_scale_from_amax(4.0) for name in names}
    options = {"config": config_of(model), "exclude": ["lm_head"], "input_scales": scales}
    dialect = {"dialect": "compressed-tensors", "activations": "nvfp4", "rotation": ROTATION}
    save_checkpoint(folder, tensors.items(), **options, **dialect)
    return tensors, scales


def logits(model, ids):
    with torch.inference_mode():
        return model(input_ids=ids).logits


def layers_of(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, NVFP4Linear)}


def unrotated_truth(model, tensors, ids):
    """Logits in float64 of the ordinary model on the dequantised weights, turned back."""
    plain = copy.deepcopy(model).double()
    with torch.no_grad():
        for name in linear_names(model):
            stored = reference.dequantize(tensors[f"{name}.weight"])
            plain.get_submodule(name).weight.copy_(turn(stored))
    return logits(plain, ids)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_model_is_the_one_that_was_rotated(tmp_path, kind):
    """A float32 sum of K products, and the rotation of 4 sums before it, err by K + 8 roundings."""
    model = toy_model(kind)
    tensors, _ = save_rotated(model, tmp_path / "q")
    truth = unrotated_truth(model, tensors, token_ids(2, 11))
    loaded = load_model(tmp_path / "q", activations="none")
    error = (logits(loaded, token_ids(2, 11)).double() - truth).norm(dim=-1)
    bound = PATH * (HIDDEN_MOST + 8) * 2.0**-24 * truth.norm(dim=-1)
    assert bool((error <= bound).all())
    for layer in layers_of(loaded).values():
        layer.rotation = None  # what a reader that overlooks the configuration would compute
    assert (logits(loaded, token_ids(2, 11)).double() - truth).norm() > 0.1 * truth.norm()


@pytest.mark.parametrize("activations", ["none", "nvfp4"])
def test_every_layer_takes_rotated_inputs(tmp_path, activations):
    model = toy_model("qwen2")
    tensors, scales = save_rotated(model, tmp_path / "q")
    loaded = load_model(tmp_path / "q", activations=activations)
    seen = []
    for name, layer in layers_of(loaded).items():
        assert (layer.rotation, layer.activations) == (ROTATION, activations)

        def check(layer, inputs, y, name=name):
            scale = scales[name] if activations == "nvfp4" else None
            assert_linear(y, rotate(inputs[0]), tensors[f"{name}.weight"], layer.bias, scale)
            seen.append(name)

        layer.register_forward_hook(check)
    logits(loaded, token_ids(2, 11))
    assert sorted(seen) == sorted(linear_names(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_layers_do_too(tmp_path, dtype):
    model = toy_model("llama", dtype=dtype)
    tensors, _ = save_rotated(model, tmp_path / "q")
    truth = unrotated_truth(model, tensors, token_ids(2, 11))
    loaded = load_model(tmp_path / "q", activations="none", packed=True)
    for name, layer in layers_of(loaded).items():

        def check(layer, inputs, y, name=name):
            x = rotate(inputs[0]).to(dtype)
            assert_linear(y, x, tensors[f"{name}.weight"])

        layer.register_forward_hook(check)
    assert_logits(logits(loaded, token_ids(2, 11)), truth.float())
    rounded = load_model(tmp_path / "q", packed=True)  # W4A4, as the checkpoint says
    assert {layer.rotation for layer in layers_of(rounded).values()} == {ROTATION}
    assert torch.isfinite(logits(rounded, token_ids(2, 11))).all()


@pytest.mark.parametrize("packed", [False, True])
def test_a_copy_of_a_loaded_model_keeps_the_rotation(tmp_path, packed):
    model = toy_model("llama", dtype=torch.bfloat16)
    save_rotated(model, tmp_path / "q")
    loaded = load_model(tmp_path / "q", packed=packed)
    layers = layers_of(loaded)
    (rotation,) = {layer.rotation for layer in layers.values()}
    own = tuple(f"{name}." for name in layers)
    tensors = {n: t for n, t in loaded.state_dict().items() if not n.startswith(own)}
    save_checkpoint(
        tmp_path / "copy",
        [*tensors.items(), *((f"{name}.weight", layer.weight) for name, layer in layers.items())],
        config=config_of(loaded),
        dialect="compressed-tensors",
        activations="nvfp4",
        exclude=["lm_head"],
        input_scales={name: layer.input_scale for name, layer in layers.items()},
        rotation=rotation,
    )
    first, second = (load_checkpoint(tmp_path / name) for name in ("q", "copy"))
    assert second.rotation == first.rotation == ROTATION
    assert set(second.names()) == set(first.names())
    for name, tensor in first.items():
        if isinstance(tensor, NVFP4Tensor):
            assert torch.equal(second[name].codes, tensor.codes)
    again = load_model(tmp_path / "copy", packed=packed)
    assert torch.equal(logits(again, token_ids(1, 9)), logits(loaded, token_ids(1, 9)))
