"""The whole path on a real model: quantise, inspect, load, generate, as a user runs it.

    pytest tests/test_smollm2.py

Real processes on SmolLM2-135M-Instruct (tests/conftest.py says where it comes from). It is too
small for any statement about accuracy; what is tested is that numbers are the right ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nvfp4r import NVFP4Linear, NVFP4Tensor, load_checkpoint
from nvfp4r.hf import load_model, saturation
from reset.trace import Trace
from tests.conftest import DIALECTS, run_command

pytestmark = pytest.mark.model

QUESTIONS = Path(__file__).parents[1] / "examples" / "data" / "questions.jsonl"
LAYERS, LINEARS_PER_LAYER = 30, 7


@pytest.fixture(scope="session")
def with_activations(smollm2, tmp_path_factory) -> Path:
    """A W4A4 checkpoint, calibrated on the questions of the demo."""
    path = tmp_path_factory.mktemp("smollm2-w4a4") / "model"
    flags = ("--model", smollm2, "--output", path, "--activations", "nvfp4")
    report = run_command("reset.cli.quantize", *flags, "--calib-data", QUESTIONS, "--json")
    assert json.loads(report)["calibration"]["samples"] == 6
    return path


@pytest.fixture(scope="session")
def token_ids(smollm2) -> torch.Tensor:
    """[2, T] ids of real text, cut to the shorter of two questions."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()[:2]
    rows = [tokenizer(json.loads(line)["question"])["input_ids"] for line in lines]
    length = min(map(len, rows))
    return torch.tensor([row[:length] for row in rows])


@torch.inference_mode()
def logits(model, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).logits


@pytest.fixture(scope="session")
def expected_logits(smollm2, smollm2_nvfp4, token_ids) -> torch.Tensor:
    """Of the ordinary model that holds the dequantised weights of the ModelOpt checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).eval()
    before = logits(model, token_ids)
    checkpoint = load_checkpoint(smollm2_nvfp4["modelopt"])
    replaced = 0
    with torch.no_grad():
        for name, tensor in checkpoint.items():
            if isinstance(tensor, NVFP4Tensor):
                model.get_parameter(name).copy_(tensor.dequantize(torch.bfloat16))
                replaced += 1
            else:
                assert torch.equal(model.get_parameter(name), tensor), f"{name} was changed"
    assert replaced == LAYERS * LINEARS_PER_LAYER
    after = logits(model, token_ids)
    assert not torch.equal(before, after)
    return after


@pytest.mark.parametrize("dialect", DIALECTS)
def test_logits_are_exactly_those_of_the_dequantised_model(
    smollm2_nvfp4, expected_logits, token_ids, dialect
):
    model = load_model(smollm2_nvfp4[dialect], activations="none")
    assert model.dtype == torch.bfloat16
    linears = [module for module in model.modules() if isinstance(module, NVFP4Linear)]
    assert len(linears) == LAYERS * LINEARS_PER_LAYER
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert torch.equal(logits(model, token_ids), expected_logits)


def test_w4a4_with_activations_off_gives_the_same_logits(
    with_activations, expected_logits, token_ids
):
    model = load_model(with_activations, activations="none")
    assert torch.equal(logits(model, token_ids), expected_logits)


def test_w4a4_quantises_activations_without_saturating_on_its_own_calibration_text(
    with_activations, expected_logits, token_ids
):
    model = load_model(with_activations)
    quantised = logits(model, token_ids)
    assert torch.isfinite(quantised).all()
    assert not torch.equal(quantised, expected_logits)
    counts = saturation(model)
    assert len(counts) == LAYERS * LINEARS_PER_LAYER
    # Calibration ran on float32 activations, this runs on bfloat16 ones that went through 4 bits:
    # a block may exceed its maximum by what that changed, but only a few do.
    blocks = sum(m.in_features // 16 for m in model.modules() if isinstance(m, NVFP4Linear))
    assert sum(counts.values()) < 1e-3 * blocks * token_ids.numel()


def test_both_dialects_hold_the_same_bits(smollm2_nvfp4):
    first, second = (load_checkpoint(smollm2_nvfp4[dialect]) for dialect in DIALECTS)
    assert first.names() == second.names()
    for (name, one), (_, two) in zip(first.items(), second.items(), strict=True):
        if isinstance(one, NVFP4Tensor):
            assert torch.equal(one.codes, two.codes), name
            scales = (tensor.block_scale.view(torch.uint8) for tensor in (one, two))
            assert torch.equal(*scales), name
            assert torch.equal(one.global_scale, two.global_scale), name
        else:
            assert torch.equal(one, two), name


def test_the_quantised_weights_are_near_their_source(smollm2, smollm2_nvfp4):
    """Rounding Gaussian weights to NVFP4 changes them by 0.095 of their norm, and trained weights
    are spread much like that; a wrong scale or a swapped nibble or row changes them far more."""
    source = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for name, tensor in load_checkpoint(smollm2_nvfp4["modelopt"]).items():
        if isinstance(tensor, NVFP4Tensor):
            weight = source.get_parameter(name).detach()
            assert (tensor.dequantize() - weight).norm() < 0.1 * weight.norm(), name


@pytest.mark.parametrize("kind", [*DIALECTS, "w4a4"])
def test_inspect_finds_no_problem(smollm2_nvfp4, with_activations, kind):
    folder = smollm2_nvfp4.get(kind, with_activations)
    report = json.loads(run_command("nvfp4r.cli", "inspect", folder, "--json"))
    assert report["problems"] == []
    assert report["quantised_modules"] == LAYERS * LINEARS_PER_LAYER
    assert report["quantised_bits_per_parameter"] == pytest.approx(4.5, abs=1e-3)
    assert report["unequal_groups"] == []


def test_generate_with_a_trace(with_activations, tmp_path):
    page = tmp_path / "trace.html"
    flags = ("--model", with_activations, "--prompt", "What is 17 times 24? Think step by step.")
    policy = ("--t-low", "0.1", "--tau0", "0.5", "--t-high", "0.6", "--seed", "7")
    out = run_command(
        "reset.cli.generate", *flags, *policy, "--max-tokens", "24", "--trace", page, "--json"
    )
    trace = Trace.from_json(out)
    assert 1 < len(trace.tokens) <= 24
    assert "<|im_start|>user\nWhat is 17 times 24?" in trace.prompt
    assert {round(token.temperature, 6) for token in trace.tokens} == {0.1, 0.6}
    assert all(0 <= token.entropy_nats < 10.8 for token in trace.tokens)  # log 49,152 = 10.80
    text = page.read_text(encoding="utf-8")
    assert text.endswith("</html>\n")
    assert f'"token_id":{trace.tokens[0].token_id},' in text


def test_the_generate_example(smollm2, tmp_path):
    preset = tmp_path / "preset.json"
    preset.write_text(json.dumps({"config": {"t_low": 0.0, "t_high": 0.0, "tau_0": 1.0}}))
    script = QUESTIONS.parents[1] / "generate.py"
    flags = ("--model", smollm2, "--preset", preset, "--max-tokens", "8", "Name a colour.")
    done = subprocess.run(
        [sys.executable, script, *map(str, flags)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "Name a colour."}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    greedy = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    expected = tokenizer.decode(greedy[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert done.stdout.strip() == expected.strip()


def test_the_calibrate_run_compare_example(smollm2, tmp_path):
    """With fewer and shorter answers than it has by itself."""
    script = QUESTIONS.parents[1] / "calibrate_run_compare.py"
    sizes = ("--problems", "2", "--max-tokens", "3")
    flags = ("--model", smollm2, "--work", tmp_path / "work", *sizes)
    done = subprocess.run(
        [sys.executable, script, *map(str, flags)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for said in ("tau_0 ", "greedy ", "reset-0.1-0.6 ", "no difference shown: the best of ReSET"):
        assert said in done.stdout
    assert "2 problems are few" in done.stdout
    calibration = json.loads((tmp_path / "work" / "calibration.json").read_text())
    assert len(calibration["problems"]) == 3
    assert len(calibration["search"]["problems"]) == 2
    assert [len(arm["seed_means"]) for arm in calibration["search"]["arms"]] == [1] * 5
    assert (tmp_path / "work" / "reset" / "scores.json").exists()
