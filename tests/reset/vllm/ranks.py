"""ReSET on two ranks that share a model: the job, and what has to hold on CPUs as on GPUs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from reset.engine import package_versions
from tests.ranks import rank_environment, run_to_end
from tests.reset.vllm.engines import RESET, ROOT, VOCABULARY, check_against_specification
from tests.reset.vllm.rank_run import MARK

PROMPTS = ([5, 6, 7], [20, 21], [40, 41, 42, 43])
TOKENS = 32
RANKS = 2


def ask(model: Path, runs: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """What `rank_run` reports, run by run; `options` are more of those of the engine."""
    params = {
        "temperature": 0.7,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "logprobs": VOCABULARY,
        "extra_args": RESET,
    }
    job = {
        "model": str(model),
        "ranks": RANKS,
        "prompts": PROMPTS,
        "params": [{**params, "seed": index} for index in range(len(PROMPTS))],
        "options": {"dtype": "bfloat16", "max_logprobs": VOCABULARY, **options},
        "runs": runs,
    }
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    done = run_to_end(
        [sys.executable, "-m", "tests.reset.vllm.rank_run"],
        json.dumps(job),
        ROOT,
        {**environment, **rank_environment()},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, f"{package_versions()}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    found: list[dict[str, Any]] = json.loads(lines[0].removeprefix(MARK))
    return found


class RankChecks:
    """Tests for a subclass that says on what they run; vLLM shows the tokens of one rank only."""

    OPTIONS: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(scope="class")
    def runs(self, toy_folder) -> list[dict[str, Any]]:
        return ask(toy_folder, runs=2, options=self.OPTIONS)

    def test_both_ranks_hold_the_same_bits(self, runs):
        """Decisions, sums, and all else that a request's history is made of."""
        for run in runs:
            one, two = run["ranks"]
            for what in ("records", "summary", "digest"):
                assert one[what] == two[what], f"{what}: {one[what]} on rank 0, {two[what]} on 1"

    def test_the_history_is_whole_and_the_policy_had_something_to_decide(self, runs):
        """Otherwise ranks would agree on nothing."""
        for rank in runs[-1]["ranks"]:
            rows = sorted(rank["summary"])[-len(PROMPTS) :]
            tokens, steps, high, _, lost = zip(*rows, strict=True)
            assert set(tokens) == {TOKENS - 1}, tokens  # the last token is not history yet
            assert min(steps) >= 1, steps
            assert 0 < sum(high) < sum(tokens), high
            assert not any(lost), lost

    @pytest.mark.parametrize("rank", range(RANKS))
    def test_l5_every_token_follows_the_specification_on_every_rank(self, runs, rank):
        """From entropies of the raw logprobs that vLLM reports, which halves of a model made."""
        for run in runs:
            for tokens, logprobs, records in zip(
                run["tokens"], run["logprobs"], run["ranks"][rank]["records"], strict=True
            ):
                result = {"tokens": [tokens], "logprobs": [logprobs], "records": records}
                used = check_against_specification(result, RESET)
                assert len(set(used)) == 2, used

    def test_a_request_gives_the_same_tokens_again(self, runs):
        assert runs[0]["tokens"] == runs[1]["tokens"], (runs[0]["tokens"], runs[1]["tokens"])
