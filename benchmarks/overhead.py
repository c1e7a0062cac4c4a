"""What ReSET adds to transformers decoding: the same fixed-length texts with and without it.

    python benchmarks/overhead.py --model .cache/smollm2-135m

Goal on a CPU: <= 10 %. Runs come in pairs, in turn off-on and on-off, so that a change of the
machine's speed hits both; recorded are the median of the pairs' ratios, their range and, on a CPU,
the time inside the processor, which does not drown in the spread of the rest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from harness import record
from reset import ReSETConfig
from reset.engine import load_engine, make_prompt
from reset.hf import ReSETLogitsProcessor, sampling_arguments


class TimedProcessor(ReSETLogitsProcessor):
    """Adds up the time spent in it; meaningful where operations finish before they return."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seconds = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        scaled = super().__call__(input_ids, scores)
        self.seconds += time.perf_counter() - start
        return scaled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=24)
    arguments = parser.parse_args()

    on_cpu = torch.device(arguments.device).type == "cpu"
    engine = load_engine(arguments.model, device=arguments.device, dtype=arguments.dtype)
    ids = make_prompt(engine, "Count from one to one hundred in words.").ids
    config = ReSETConfig(t_low=0.1, tau_0=0.55)

    def seconds_per_token(batch: int, with_reset: bool) -> tuple[float, float]:
        """Of everything, and of the processor."""
        input_ids = torch.tensor([ids] * batch, device=arguments.device)
        processor = TimedProcessor(config, engine.tokenizer)
        torch.manual_seed(0)
        start = time.perf_counter()
        engine.model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            logits_processor=[processor] if with_reset else [],
            min_new_tokens=arguments.tokens,
            **sampling_arguments(max_new_tokens=arguments.tokens),
        )
        whole = time.perf_counter() - start
        return whole / arguments.tokens, processor.seconds / arguments.tokens

    for batch in (1, 8):
        times: dict[bool, list[float]] = {False: [], True: []}
        own: dict[bool, list[float]] = {False: [], True: []}
        for pair in range(-1, arguments.pairs):
            for with_reset in (False, True) if pair % 2 else (True, False):
                whole, inside = seconds_per_token(batch, with_reset)
                if pair >= 0:  # the first pair warms up
                    times[with_reset].append(whole)
                    own[with_reset].append(inside)
        ratios = [on / off for off, on in zip(times[False], times[True], strict=True)]
        for with_reset in (False, True):
            record(
                "overhead",
                f"transformers_{arguments.device}_{'on' if with_reset else 'off'}",
                model=Path(arguments.model).name,
                dtype=str(engine.model.dtype).removeprefix("torch."),
                batch=batch,
                tpot_ms=statistics.median(times[with_reset]) * 1e3,
                processor_ms=statistics.median(own[with_reset]) * 1e3 if on_cpu else None,
                on_over_off=statistics.median(ratios),
                lowest_ratio=min(ratios),
                highest_ratio=max(ratios),
            )


if __name__ == "__main__":
    main()
