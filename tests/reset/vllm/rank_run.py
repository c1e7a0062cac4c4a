"""Runs the pocket reasoner on several ranks with ReSET on, and prints what every rank holds.

    python -m tests.reset.vllm.rank_run < job.json

A job: {"model": folder, "ranks": n, "prompts": [ids], "params": {} for SamplingParams, "runs": how
often the prompts are answered}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

MARK = "RANKS "


class StateExtension:
    """Of vLLM's workers: what ReSET has summed up on a rank, slot by slot."""

    def reset_state(self) -> list[list[float]]:
        from reset.vllm.processor import ReSETLogitsProcessor

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        (processor,) = (
            one
            for one in runner.input_batch.logitsprocs.all
            if isinstance(one, ReSETLogitsProcessor)
        )
        summary: list[list[float]] = processor._tracker.summary().tolist()
        return summary


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
        worker_extension_cls="tests.reset.vllm.rank_run.StateExtension",
        logits_processors=["reset.vllm:ReSETLogitsProcessor"],
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=len(job["prompts"]),
        kv_cache_memory_bytes=1 << 26,
        enable_prefix_caching=False,
    )
    params = vllm.SamplingParams(**job["params"])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    runs = []
    for _ in range(job["runs"]):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        runs.append(
            {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "ranks": llm.collective_rpc("reset_state"),
            }
        )
    print(MARK + json.dumps(runs))


if __name__ == "__main__":
    main()
