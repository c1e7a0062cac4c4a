"""Two GPUs that share a model decide alike, bit for bit, or their tokens would part.

make test-gpu          (needs vLLM, two GPUs and the pocket reasoner; skipped elsewhere)
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from reset.engine import package_versions
from tests.reset.vllm.rank_run import MARK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.pocket,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

ROOT = Path(__file__).parents[3]
QUESTIONS = (
    "Start with 347. Add 586. Multiply by 7. What is the result?",
    "Use 1, 20, 23, 25 to make 78.",
    "Start with 12. Subtract 5. What is the result?",
)
TOKENS = 96
RESET = {"reset": 1, "t_low": 0.3, "t_high": 1.0, "tau_0": 0.05}


def ask(pocket: Path, ranks: int, runs: int) -> list[dict]:
    tokenizer = AutoTokenizer.from_pretrained(pocket)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    params = {"temperature": 1.0, "seed": 7, "max_tokens": TOKENS, "ignore_eos": True}
    job = {
        "model": str(pocket),
        "ranks": ranks,
        "prompts": prompts,
        "params": {**params, "extra_args": RESET},
        "runs": runs,
    }
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "tests.reset.vllm.rank_run"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, f"{package_versions()}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    found: list[dict] = json.loads(lines[0].removeprefix(MARK))
    return found


@pytest.fixture(scope="module")
def runs(pocket):
    return ask(pocket, ranks=2, runs=2)


def test_both_ranks_hold_the_same_bits(runs):
    for run in runs:
        one, two = run["ranks"]
        assert one == two
        tokens = sorted(row[0] for row in one)[-len(QUESTIONS) :]
        assert tokens == [TOKENS - 1] * len(QUESTIONS)  # the last token is not history yet


def test_a_request_gives_the_same_tokens_again(runs):
    assert runs[0]["tokens"] == runs[1]["tokens"]
