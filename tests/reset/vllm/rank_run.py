"""Runs a model on several ranks with ReSET on, and prints what every rank holds.

    python -m tests.reset.vllm.rank_run < job.json

A job: {"model": folder, "ranks": n, "prompts": [ids], "params": [{} for SamplingParams, one for
each prompt], "options": {} for LLM, "runs": how often the prompts are answered}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

MARK = "RANKS "


def main() -> None:
    job = json.load(sys.stdin)
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_USE_V2_MODEL_RUNNER="0",
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
    )
    import vllm

    llm = vllm.LLM(
        job["model"],
        tensor_parallel_size=job["ranks"],
        disable_custom_all_reduce=True,
        worker_extension_cls="tests.reset.vllm.recorder.StateExtension",
        logits_processors=["tests.reset.vllm.recorder:Recorder"],
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=len(job["prompts"]),
        kv_cache_memory_bytes=1 << 26,
        enable_prefix_caching=False,
        **job["options"],
    )
    runs = [run(vllm, llm, job) for _ in range(job["runs"])]
    llm.llm_engine.engine_core.shutdown()
    print(MARK + json.dumps(runs))


def run(vllm: Any, llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Tokens and raw logprobs of each prompt; of each rank, its decisions prompt by prompt."""
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    params = [vllm.SamplingParams(**values) for values in job["params"]]
    answers = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    ranks = llm.collective_rpc("reset_state")
    requests = [one.extra_args["reset_request_id"] for one in params]
    for rank in ranks:
        rank["records"] = [rank["records"][request] for request in requests]
    return {
        "tokens": [list(answer.token_ids) for answer in answers],
        "logprobs": [
            [{token: entry.logprob for token, entry in row.items()} for row in answer.logprobs]
            for answer in answers
        ],
        "ranks": ranks,
    }


if __name__ == "__main__":
    main()
