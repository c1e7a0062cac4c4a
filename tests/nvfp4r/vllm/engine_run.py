"""Runs real engines in this process, one after the other, and prints what happened as JSON.

    python -m tests.nvfp4r.vllm.engine_run < jobs.json

Jobs by name: {"model": folder, "environment": {...} for this job alone, "enable": how often to call
nvfp4r.enable(), "disable": bool, "configure": {...}, "options": {...} for LLM, "prompts": [ids],
"tokens": n, "stop": [ids that end an answer], "again": bool, "reload": folder, "rpc": method of the
workers}.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

MARK = "RESULTS "


class Lines(logging.Handler):
    """Keeps what the plug-in logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    jobs = json.load(sys.stdin)
    print(MARK + json.dumps({name: run(job) for name, job in jobs.items()}))


def run(job: dict[str, Any]) -> dict[str, Any]:
    before = dict(os.environ)
    logger = logging.getLogger("vllm.nvfp4r")
    handler = Lines()
    logger.addHandler(handler)
    try:
        os.environ.update(job.get("environment", {}))
        return {**run_engine(job), "log": handler.lines}
    except Exception as error:  # noqa: BLE001 - what whoever starts the engine would see
        return {"error": f"{type(error).__name__}: {error}", "log": handler.lines}
    finally:
        logger.removeHandler(handler)
        os.environ.clear()
        os.environ.update(before)


def run_engine(job: dict[str, Any]) -> dict[str, Any]:
    import nvfp4r
    from nvfp4r.vllm.record import record

    record().layers.clear()
    record().declined.clear()
    record().reset_counts()
    for _ in range(job.get("enable", 0)):
        nvfp4r.enable()
    if job.get("configure"):
        nvfp4r.configure(**job["configure"])
    if job.get("disable"):
        nvfp4r.disable()
    import vllm

    options = dict(
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        max_logprobs=-1,
        kv_cache_memory_bytes=1 << 26,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    llm = vllm.LLM(job["model"], **{**options, **job.get("options", {})})
    try:
        answer = {"calls": generate(vllm, llm, job)}
        if job.get("again"):
            answer["again"] = generate(vllm, llm, job)
        if "reload" in job:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": job["reload"]})
            answer["reloaded"] = generate(vllm, llm, job)
        if "rpc" in job:
            answer["rpc"] = llm.collective_rpc(job["rpc"])
        answer["status"] = nvfp4r.status().as_dict()
        answer["told"] = str(nvfp4r.status())
        answer["hash"] = llm.llm_engine.vllm_config.compute_hash()
        return answer
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        vllm.distributed.cleanup_dist_env_and_memory()


def generate(vllm: Any, llm: Any, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Greedy tokens, and the logprobs of the whole vocabulary at each of them."""
    params = vllm.SamplingParams(
        temperature=0,
        max_tokens=job.get("tokens", 4),
        ignore_eos=True,
        stop_token_ids=job.get("stop"),
        logprobs=job.get("logprobs", -1),
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                [row[token].logprob for token in sorted(row)] for row in output.outputs[0].logprobs
            ],
        }
        for output in llm.generate(prompts, params, use_tqdm=False)
    ]


if __name__ == "__main__":
    main()
