"""Random prompts decoded by a vLLM engine, and the times that takes, seen from outside it."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

FIRST = 32  # tokens; steps before every request has as many are not timed
PROCESSOR = "reset.vllm:ReSETLogitsProcessor"
REQUEST = {"reset": 1, "t_low": 0.1, "t_high": 1.0, "tau_0": 0.5505}


def decode(
    engine: Any, batch: int, prompt: int, tokens: int, *, reset: bool, **sampling: float
) -> dict[str, float]:
    """Decode `batch` prompts of `prompt` random tokens at once, to `tokens` each.

    Returns:
        `ttft_ms`, from handing over the prompts to the last request's first token; where `tokens`
        is above FIRST also `tpot_ms`, the time per step between output tokens FIRST and the last.
    """
    start = time.perf_counter()
    hand_over(engine, batch, prompt, tokens, reset=reset, **sampling)
    done: dict[str, int] = {}
    first = began = None
    reached = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            done[output.request_id] = len(output.outputs[0].token_ids)
        fewest = min(done.values()) if len(done) == batch else 0
        if first is None and fewest >= 1:
            first = time.perf_counter()
        if began is None and fewest >= FIRST:
            began, reached = time.perf_counter(), fewest
    end = time.perf_counter()
    assert first is not None
    figures = {"ttft_ms": (first - start) * 1e3}
    if tokens > FIRST:
        assert began is not None
        figures["tpot_ms"] = (end - began) / (tokens - reached) * 1e3
    return figures


def hand_over(
    engine: Any, batch: int, prompt: int, tokens: int, *, reset: bool, **sampling: float
) -> None:
    from vllm import SamplingParams

    picks = random.Random(batch)
    width = engine.model_config.get_vocab_size()
    for index in range(batch):
        params = SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=dict(REQUEST) if reset else None,
            **sampling,
        )
        ids = [picks.randrange(width) for _ in range(prompt)]
        name = f"{index}-{time.monotonic_ns()}"
        engine.add_request(name, {"prompt_token_ids": ids}, params)


def profile(
    engine: Any, batch: int, prompt: int, file: Path, *, reset: bool, **sampling: float
) -> str:
    """A timeline of 16 decode steps in `file`, and a table of the kernels that take most of them.

    The engine must run in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0).
    """
    import torch

    has_gpu = torch.cuda.is_available()
    hand_over(engine, batch, prompt, FIRST + 32, reset=reset, **sampling)
    for _ in range(FIRST):
        engine.step()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if has_gpu:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as seen:
        for _ in range(16):
            engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    seen.export_chrome_trace(str(file))
    key = "self_cuda_time_total" if has_gpu else "self_cpu_time_total"
    table: str = seen.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=80)
    return table
