"""What ReSET adds to transformers decoding: the same fixed-length texts with and without it.

    python benchmarks/overhead.py --model .cache/smollm2-135m

Goal on a CPU: <= 10 %. Runs alternate, so that a change of the machine's speed hits both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from harness import record
from reset import ReSETConfig
from reset.engine import load_engine, make_prompt
from reset.hf import ReSETLogitsProcessor, sampling_arguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()

    engine = load_engine(arguments.model, device=arguments.device, dtype=arguments.dtype)
    ids = make_prompt(engine, "Count from one to one hundred in words.").ids
    config = ReSETConfig(t_low=0.1, tau_0=0.55)

    def seconds_per_token(batch: int, with_reset: bool) -> float:
        input_ids = torch.tensor([ids] * batch, device=arguments.device)
        processor = ReSETLogitsProcessor(config, engine.tokenizer)
        torch.manual_seed(0)
        start = time.perf_counter()
        engine.model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            logits_processor=[processor] if with_reset else [],
            min_new_tokens=arguments.tokens,
            **sampling_arguments(max_new_tokens=arguments.tokens),
        )
        return (time.perf_counter() - start) / arguments.tokens

    for batch in (1, 8):
        off, on = [], []
        for round_number in range(arguments.rounds + 1):
            pair = seconds_per_token(batch, False), seconds_per_token(batch, True)
            if round_number:  # the first warms up
                off.append(pair[0])
                on.append(pair[1])
        ratio = statistics.median(b / a for a, b in zip(off, on, strict=True))
        for impl, times in (("off", off), ("on", on)):
            record(
                "overhead",
                f"transformers_{arguments.device}_{impl}",
                model=Path(arguments.model).name,
                dtype=str(engine.model.dtype).removeprefix("torch."),
                batch=batch,
                tpot_ms=statistics.median(times) * 1e3,
                on_over_off=ratio,
            )


if __name__ == "__main__":
    main()
