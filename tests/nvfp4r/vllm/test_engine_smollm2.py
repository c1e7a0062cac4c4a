"""SmolLM2-135M in a real vLLM engine on a CPU, in both dialects: the dequantised model's text.

Weights of a dequantised model are rounded to bfloat16 once more, and sums are taken in another
order. Prompts are chosen so that this decides nothing: the best token leads by a factor of e.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from nvfp4r import NVFP4Tensor, load_checkpoint
from tests.conftest import run_command
from tests.nvfp4r.vllm.engines import run_engines, with_entry_point

pytestmark = [pytest.mark.vllm, pytest.mark.model]

DIALECTS = ("modelopt", "compressed-tensors")
TEXTS = (
    "1, 2, 3, 4, 5, 6, 7,",
    "a, b, c, d, e, f, g,",
    "10, 20, 30, 40, 50, 60,",
    "100, 200, 300, 400, 500,",
)
TOKENS = 10
LEAD = 1.0  # nats


@pytest.fixture(scope="module")
def answers(smollm2, smollm2_nvfp4, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2-engines")
    texts = folder / "texts.txt"
    texts.write_text("The sky is blue.\n\n1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12\n")
    flags = ("--activations", "nvfp4", "--calib-data", texts, "--format", DIALECTS[1], "--json")
    files = ("--model", smollm2, "--output", folder / "w4a4")
    run_command("reset.cli.quantize", *files, *flags)
    models = {**smollm2_nvfp4, "w4a4": folder / "w4a4", "twin": folder / "twin"}
    save_twin(smollm2_nvfp4["modelopt"], models["twin"])

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    jobs = {
        name: {
            "model": str(path),
            "prompts": prompts,
            "tokens": TOKENS,
            "logprobs": 2,
            "enable": int(name != "twin"),
            "configure": {"activations": "nvfp4"} if name == "w4a4" else {},
        }
        for name, path in models.items()
    }
    found = run_engines([(jobs, {})], with_entry_point(folder / "plugin"))
    for answer in found.values():
        assert "error" not in answer, answer
        answer["texts"] = [tokenizer.decode(call["tokens"]) for call in answer["calls"]]
    return found


def save_twin(source, folder) -> None:
    """The dequantised bfloat16 model."""
    checkpoint = load_checkpoint(source)
    plain = {
        name: t.dequantize(torch.bfloat16) if isinstance(t, NVFP4Tensor) else t
        for name, t in checkpoint.items()
    }
    folder.mkdir()
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(checkpoint.config)))


def test_the_prompts_leave_nothing_to_rounding(answers):
    for call in answers["twin"]["calls"]:
        for row in call["logprobs"]:
            best, second = sorted(row)[-1:-3:-1]
            assert best - second > LEAD


@pytest.mark.parametrize("dialect", DIALECTS)
def test_w4a16_gives_the_text_of_the_dequantised_model(answers, dialect):
    assert answers[dialect]["texts"] == answers["twin"]["texts"]
    assert all(len(call["tokens"]) == TOKENS for call in answers[dialect]["calls"])


def test_both_dialects_are_one_model(answers):
    one, other = (answers[dialect]["calls"] for dialect in DIALECTS)
    assert one == other  # logprobs included


def test_w4a4_rounds_activations_and_still_counts(answers):
    for group in answers["w4a4"]["status"]["groups"]:
        assert (group["stored_activations"], group["activations"]) == ("nvfp4", "nvfp4")
    assert answers["w4a4"]["calls"] != answers["modelopt"]["calls"]
    assert answers["w4a4"]["texts"][0].startswith(" 8, 9, 10")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_d4_status_tells_what_ran(answers, dialect):
    status = answers[dialect]["status"]
    layers = sorted(name for group in status["groups"] for name in group["layers"])
    assert layers == [
        "model.layers.*.mlp.down_proj x 30",
        "model.layers.*.mlp.gate_up_proj x 30",
        "model.layers.*.self_attn.o_proj x 30",
        "model.layers.*.self_attn.qkv_proj x 30",
    ]
    assert {group["dialect"] for group in status["groups"]} == {dialect}
    assert status["calls"]["reference"] >= 120 * TOKENS
    assert answers["twin"]["status"]["groups"] == []
