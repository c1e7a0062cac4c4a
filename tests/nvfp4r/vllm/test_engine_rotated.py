"""Rotated checkpoints in real vLLM engines on a CPU: SmolLM2's text is that of nvfp4r.hf.

The engine rounds each sum once, nvfp4r.hf each weight, too, and sums are taken in another order.
Prompts are chosen so that this decides nothing: the best token leads by a factor of e.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nvfp4r import save_checkpoint
from nvfp4r.hf import load_model
from nvfp4r.methods.rotation import quantize_rotated
from nvfp4r.quantize import global_scale_from_amax
from tests.nvfp4r.rotated_truth import turn
from tests.nvfp4r.vllm.engines import run_engines, with_entry_point
from tests.nvfp4r.vllm.models import PROMPTS, make_model

pytestmark = [pytest.mark.vllm, pytest.mark.model]

TEXTS = ("1, 2, 3, 4, 5, 6, 7,", "10, 20, 30, 40, 50, 60,")
TOKENS = 6
LEAD = 1.0  # nats
KINDS = ("none", "nvfp4")  # what is done with activations: W4A16, W4A4
CT = {"dialect": "compressed-tensors", "rotation": "hadamard16"}


def save_rotated(folder, weights: dict, config: dict, input_scales=None) -> None:
    """Writes the model with all its linear layers rotated, the head and embeddings aside."""
    tensors = [
        (name, quantize_rotated(tensor, name=name) if name.endswith("_proj.weight") else tensor)
        for name, tensor in weights.items()
    ]
    activations = "none" if input_scales is None else "nvfp4"
    options = {"exclude": ["lm_head"], "activations": activations, "input_scales": input_scales}
    save_checkpoint(folder, tensors, config=config, **options, **CT)


def keep_one_matrix(source, folder) -> None:
    """What a writer that stores shared tensors once makes of it."""
    folder.mkdir()
    stored = load_file(source / "model.safetensors")
    matrices = [name for name in stored if name.endswith("hadamard16_input.weight")]
    for name in matrices[1:]:
        del stored[name]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())


def input_scales(folder, ids) -> dict[str, torch.Tensor]:
    """Of every linear layer but the head, from its rotated inputs for a few tokens."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), {}
    for name, layer in model.named_modules():
        if name.endswith("_proj"):

            def see(layer, inputs, name=name):
                found[name] = global_scale_from_amax(turn(inputs[0]).abs().max(), name, 1.5)

            layer.register_forward_pre_hook(see)
    model(torch.tensor([ids]))
    return found


@pytest.fixture(scope="module")
def folders(smollm2, tmp_path_factory):
    """SmolLM2 as W4A4; and a toy as W4A16, with all matrices, with one, and another toy."""
    folder = tmp_path_factory.mktemp("rotated-engines")
    weights = load_file(smollm2 / "model.safetensors")
    config = json.loads((smollm2 / "config.json").read_text())
    scales = input_scales(smollm2, AutoTokenizer.from_pretrained(smollm2)(TEXTS[0])["input_ids"])
    save_rotated(folder / "smollm2", weights, config, scales)

    toy = make_model()
    toy_config = json.loads(toy.config.to_json_string())
    save_rotated(folder / "toy", toy.state_dict(), toy_config)
    keep_one_matrix(folder / "toy", folder / "toy-one")
    with torch.no_grad():
        for layer in toy.model.layers:
            layer.mlp.down_proj.weight.mul_(-1)
    save_rotated(folder / "toy-other", toy.state_dict(), toy_config)
    return folder


@pytest.fixture(scope="module")
def answers(folders, smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    text = {"prompts": prompts, "tokens": TOKENS, "logprobs": 2, "enable": 1}
    jobs = {
        **{f"smollm2-{kind}": {**text, "configure": {"activations": kind}} for kind in KINDS},
        "toy": {"prompts": PROMPTS, "enable": 1, "reload": str(folders / "toy-other")},
        "toy-one": {"prompts": PROMPTS, "enable": 1},
        "toy-other": {"prompts": PROMPTS, "enable": 1},
    }
    for name, job in jobs.items():
        job["model"] = str(folders / ("smollm2" if name.startswith("smollm2") else name))
    found = run_engines([(jobs, {})], with_entry_point(folders / "plugin"))
    for answer in found.values():
        assert "error" not in answer, answer
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_that_of_nvfp4r_hf(answers, folders, smollm2, kind):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = load_model(folders / "smollm2", activations=kind)
    options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None}
    for text, call in zip(TEXTS, answers[f"smollm2-{kind}"]["calls"], strict=True):
        ids = tokenizer(text, return_tensors="pt")
        expected = model.generate(**ids, **options)[0, ids["input_ids"].shape[1] :]
        assert tokenizer.decode(call["tokens"]) == tokenizer.decode(expected)
        assert len(call["tokens"]) == TOKENS


@pytest.mark.parametrize("kind", KINDS)
def test_the_prompts_leave_nothing_to_rounding(answers, kind):
    for call in answers[f"smollm2-{kind}"]["calls"]:
        for row in call["logprobs"]:
            best, second = sorted(row)[-1:-3:-1]
            assert best - second > LEAD


@pytest.mark.parametrize("kind", KINDS)
def test_d4_status_tells_the_rotation(answers, kind):
    answer = answers[f"smollm2-{kind}"]
    groups = answer["status"]["groups"]
    assert {group["rotation"] for group in groups} == {"hadamard16"}
    assert {group["activations"] for group in groups} == {kind}
    assert answer["told"].count(", rotated by hadamard16;") == len(groups) == 4
    assert answer["status"]["declined"] == {}


def test_matrices_may_be_stored_once_or_with_every_layer(answers):
    assert answers["toy-one"]["calls"] == answers["toy"]["calls"]


def test_a12_a_second_load_gives_the_second_model(answers):
    assert answers["toy"]["reloaded"] == answers["toy-other"]["calls"]
    assert answers["toy"]["reloaded"] != answers["toy"]["calls"]
