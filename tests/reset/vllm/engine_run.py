"""Runs a real engine in this process on a job, and prints what happened as JSON.

    python -m tests.reset.vllm.engine_run < job.json

A job: {"runner": "v1" or "v2", "is_async": bool, "has_reset": bool, "model": folder,
"environment": {}, "options": {} for LLM, "calls": [call]}. A call is one batch of requests,
[{"prompt": ids, "params": {} for SamplingParams}].
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

MARK = "RESULT "


def main() -> None:
    job = json.load(sys.stdin)
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_USE_V2_MODEL_RUNNER="1" if job["runner"] == "v2" else "0",
    )
    os.environ.update(job.get("environment", {}))
    from tests.reset.vllm import shim

    if job["runner"] == "v2":
        shim.use_v2_runner()
    import vllm

    if job["runner"] == "v2":
        shim.finish_v2_runner()
    if job.get("is_async"):
        shim.force_async_scheduling()
    lines: list[str] = []
    try:
        result = run(job, vllm, lines)
    except (ValueError, RuntimeError) as error:
        result = {"error": str(error)}
    print(MARK + json.dumps({**result, "log": lines}))


def run(job: dict[str, Any], vllm: Any, lines: list[str]) -> dict[str, Any]:
    from reset.vllm.log import logger
    from tests.reset.vllm.recorder import Recorder

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    rows: list[list[int]] = []
    came_back: list[int] = []
    built: list[Any] = []

    class Recording(Recorder):
        def __init__(self, *arguments: Any) -> None:
            built.append(self)
            super().__init__(*arguments)
            known = self._table._known

            def note(request: Any, *arguments: Any) -> Any:
                found = known(request, *arguments)
                if found is not None:
                    came_back.append(found.slot)
                return found

            self._table._known = note

        def decided(self, layout: Any, decision: Any) -> None:
            rows.append(layout.position.tolist())
            super().decided(layout, decision)

    options = dict(
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        kv_cache_memory_bytes=1 << 26,
        enable_prefix_caching=False,
        logits_processors=[Recording] if job["has_reset"] else None,
    )
    engine = vllm.LLM(job["model"], **{**options, **job.get("options", {})})
    logger.addHandler(Lines())  # after vLLM has set up its own logging
    logger.setLevel(logging.DEBUG)
    calls = []
    for call in job["calls"]:
        prompts = [{"prompt_token_ids": entry["prompt"]} for entry in call]
        params = []
        for entry in call:
            values = dict(entry["params"])
            if "choice" in values:
                choice = vllm.sampling_params.StructuredOutputsParams(choice=values.pop("choice"))
                values["structured_outputs"] = choice
            params.append(vllm.SamplingParams(**values))
        try:
            outputs = engine.generate(prompts, params, use_tqdm=False)
        except Exception as error:  # noqa: BLE001 - what a client would be told
            calls.append({"refused": f"{type(error).__name__}: {error}"})
            continue
        results = []
        for output, given in zip(outputs, params, strict=True):
            identity = (given.extra_args or {}).get("reset_request_id")
            results.append(
                {
                    "tokens": [list(one.token_ids) for one in output.outputs],
                    "logprobs": [_logprobs(one.logprobs) for one in output.outputs],
                    "cached": output.num_cached_tokens,
                    "records": built[0].records.get(identity, {}) if built else {},
                }
            )
        calls.append({"results": results})
    lost = sum(row[4] for row in built[0]._tracker.summary().tolist()) if built else 0
    return {"calls": calls, "lost": lost, "came_back": came_back, "rows": rows}


def _logprobs(rows: Any) -> Any:
    if rows is None:
        return None
    return [{token: entry.logprob for token, entry in row.items()} for row in rows]


if __name__ == "__main__":
    main()
