"""Real vLLM engines on a CPU: NVFP4 checkpoints against their dequantised twins, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nvfp4r import NVFP4Tensor
from tests.nvfp4r.vllm.engines import run_engines, with_entry_point
from tests.nvfp4r.vllm.models import (
    INPUT_SCALE,
    PROMPTS,
    make_model,
    quantised,
    save,
    save_twin,
)

pytestmark = pytest.mark.vllm

DIALECTS = ("modelopt", "compressed-tensors")
UNEQUAL = {"k_proj": 1, "v_proj": 3, "up_proj": 2}  # powers of two


def unequal(name: str) -> int:
    return UNEQUAL.get(name.rpartition(".")[2], 0)


def doubled(tensors: dict) -> dict:
    """The same codes under global scales twice as large."""
    return {
        name: NVFP4Tensor(t.codes, t.block_scale, 2 * t.global_scale)
        if isinstance(t, NVFP4Tensor)
        else t
        for name, t in tensors.items()
    }


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Every job of this file: engines take seconds to start, and processes more.

    Two models: "plain", and "rich" with biases, unequal scales in fused layers and a quantised
    head; "doubled" is "rich" with other scales.
    """
    folder = tmp_path_factory.mktemp("engines")
    llama, qwen2 = make_model(), make_model("qwen2")
    plain, rich = quantised(llama), quantised(qwen2, head=True, extra=unequal)
    models = (("plain", llama, plain), ("rich", qwen2, rich), ("doubled", qwen2, doubled(rich)))
    for name, model, tensors in models:
        save_twin(folder / f"{name}-twin", model, tensors)
        for dialect in DIALECTS:
            save(folder / f"{name}-{dialect}", model, tensors, dialect)
    for dialect in DIALECTS:
        save(folder / f"w4a4-{dialect}", llama, plain, dialect, input_scale=INPUT_SCALE)

    def job(name: str, **others):
        return {"model": str(folder / name), "prompts": PROMPTS, **others}

    jobs = {f"{name}-twin": job(f"{name}-twin") for name, _, _ in models}
    others = {}
    for dialect in DIALECTS:
        others[f"plain-{dialect}"] = job(f"plain-{dialect}", enable=1)
        again = str(folder / f"doubled-{dialect}")
        others[f"rich-{dialect}"] = job(f"rich-{dialect}", enable=1, reload=again)
        jobs[f"w4a4-{dialect}"] = job(f"w4a4-{dialect}", enable=2)
        rounded = job(f"w4a4-{dialect}", enable=1, configure={"activations": "nvfp4"})
        jobs[f"w4a4-{dialect}-rounded"] = rounded
    others["limited"] = job("plain-modelopt", enable=1, configure={"gemv_max_m": 2})
    for name in ("plain-modelopt", "w4a4-compressed-tensors"):
        others[f"off-{name}"] = job(name, enable=1, disable=True)
    groups = [(jobs, {}), (others, {})]
    return run_engines(groups, with_entry_point(folder / "plugin"))


def calls(answers: dict, name: str, key: str = "calls") -> list[dict]:
    answer = answers[name]
    assert "error" not in answer, (name, answer)
    return answer[key]


def logprobs(found: list[dict]) -> list[Tensor]:
    return [torch.tensor(call["logprobs"]) for call in found]


def assert_same(found: list[dict], expected: list[dict]) -> None:
    """The same tokens, and the same logprobs of the whole vocabulary, bit for bit."""
    assert [call["tokens"] for call in found] == [call["tokens"] for call in expected]
    for one, other in zip(logprobs(found), logprobs(expected), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("model", ["plain", "rich"])
def test_a11_w4a16_is_the_dequantised_model(answers, model, dialect):
    """Biases, unequal scales of fused layers and a quantised head included."""
    assert_same(calls(answers, f"{model}-{dialect}"), calls(answers, f"{model}-twin"))


def test_a2_unequal_scales_are_seen_and_would_matter(answers):
    """Otherwise the test above would pass with the largest scale for all parts, too."""
    one, other = (logprobs(calls(answers, f"{model}-twin")) for model in ("rich", "doubled"))
    assert max((a - b).abs().max() for a, b in zip(one, other, strict=True)) > 1.0
    groups = answers["rich-modelopt"]["status"]["groups"]
    assert {tuple(group["layers"]): group["unequal_scales"] for group in groups} == {
        ("model.layers.*.self_attn.qkv_proj x 2",): 2,
        ("model.layers.*.self_attn.o_proj x 2",): 0,
        ("model.layers.*.mlp.gate_up_proj x 2",): 2,
        ("model.layers.*.mlp.down_proj x 2",): 0,
        ("lm_head",): 0,
    }


@pytest.mark.parametrize("dialect", DIALECTS)
def test_d4_w4a4_leaves_activations_alone_on_a_cpu_and_says_why(answers, dialect):
    name = f"w4a4-{dialect}"
    assert_same(calls(answers, name), calls(answers, "plain-twin"))
    (line,) = answers[name]["log"]
    assert "activations none: the checkpoint is W4A4, but a CPU has no FP4 units" in line
    group = answers[name]["status"]["groups"][0]
    assert (group["stored_activations"], group["activations"]) == ("nvfp4", "none")
    assert group["dialect"] == dialect


def test_w4a4_rounds_activations_where_it_is_told_to(answers):
    one, other = (calls(answers, f"w4a4-{dialect}-rounded") for dialect in DIALECTS)
    assert_same(one, other)
    exact = logprobs(calls(answers, "plain-twin"))
    assert max((a - b).abs().max() for a, b in zip(logprobs(one), exact, strict=True)) > 0.1
    for group in answers["w4a4-modelopt-rounded"]["status"]["groups"]:
        assert group["activations"] == "nvfp4"


@pytest.mark.parametrize("name", ["plain-modelopt", "w4a4-compressed-tensors"])
def test_switched_off_the_engine_is_vllms_own_which_cannot(answers, name):
    answer = answers[f"off-{name}"]
    assert "ValueError" in answer["error"]
    assert "kernel" in answer["error"].lower()
    assert not any("run on torch.ops.nvfp4r" in line for line in answer["log"])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a12_a_second_load_gives_the_second_model(answers, dialect):
    found = calls(answers, f"rich-{dialect}", "reloaded")
    assert_same(found, calls(answers, "doubled-twin"))


def test_d6_every_call_is_counted_by_its_path_and_limits_are_told(answers):
    answer = answers["limited"]
    assert_same(calls(answers, "limited"), calls(answers, "plain-twin"))
    # 2 layers of 4 matrices; a step for the prompts and 3 for the other tokens, at least
    assert answer["status"]["calls"]["reference"] >= 2 * 4 * 4
    for group in answer["status"]["groups"]:
        assert group["gemv_max_m"] == 2
        assert group["architecture"] == "cpu"
        (path,) = group["paths"]
        assert (path["path"], path["first"], path["last"]) == ("reference", 1, None)
    assert answer["hash"] != answers["plain-modelopt"]["hash"]  # the key of compiled graphs
