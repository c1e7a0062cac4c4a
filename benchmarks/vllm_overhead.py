"""What ReSET adds to decoding in vLLM: time per output token with it off and on, same engine.

    python benchmarks/vllm_overhead.py --tokenizer .cache/smollm2-135m

A model of Qwen3-8B's shape with random NVFP4 weights (--plain: bfloat16), prompts of 512 random
tokens, temperature 1.0, top-p 0.95; the time per token of tokens 33 .. 288. Four engines: stock, as
vLLM chooses its runner; stock_v1, on the V1 runner, which vLLM < 0.31 needs for any logits
processor; and ReSET loaded by name and by entry point. All start together, each in a process of its
own, and are measured in turn, once in every round. In the latter two, a round is a pair of runs
with ReSET on and off for all requests, in turn off-on and on-off. Goal: the median of the pairs'
ratios is at most 1.02.

--sync-check runs a few tokens with VLLM_GPU_SYNC_CHECK=error instead and measures nothing. --shape
tiny --plain tries the program on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import random_model
from decoding import FIRST, PROCESSOR, decode
from engines import Answer, EngineError, Engines, Program, serve, write_entry_point
from harness import record

STOCK = ("stock", "stock_v1")
LOADED = (*STOCK, "name", "entry_point")
PROMPT, LAST, CHECKED, WARM = 512, 288, FIRST + 32, 4  # tokens
LENGTH = 1024  # tokens, of a prompt and its output
Times = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True, help="folder; finds the step borders")
    parser.add_argument("--shape", default="qwen3-8b", choices=random_model.SHAPES)
    parser.add_argument("--plain", action="store_true", help="bfloat16 weights")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--loaded", nargs="+", default=list(LOADED), choices=LOADED)
    parser.add_argument("--sync-check", action="store_true")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds")
    parser.add_argument("--logs", type=Path, help="folder that keeps what the engines print")
    parser.add_argument("--engine", choices=LOADED, help=argparse.SUPPRESS)  # in its process
    arguments = parser.parse_args()
    if min(*arguments.batches, arguments.pairs) < 1:
        parser.error(f"--batches {arguments.batches} --pairs {arguments.pairs}: need 1 or more")
    if arguments.engine:
        with tempfile.TemporaryDirectory() as folder:
            serve(lambda: start_engine(Path(folder), arguments))
        return
    if not Path(arguments.tokenizer).is_dir():
        parser.error(f"--tokenizer {arguments.tokenizer} is no folder; give that of a tokenizer")
    try:
        compare(arguments)
    except EngineError as error:
        sys.exit(str(error))


def compare(arguments: argparse.Namespace) -> None:
    names = list(dict.fromkeys(arguments.loaded))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        logs = arguments.logs or folder / "logs"
        with Engines(folder / "caches", logs, arguments.start_timeout) as engines:
            began = time.monotonic()
            engines.start({name: program(name, folder, arguments) for name in names})
            print(f"{', '.join(names)} ready in {time.monotonic() - began:.0f} s", flush=True)
            for name in names if arguments.sync_check else ():
                engines.ask(name, question(max(arguments.batches), name not in STOCK, CHECKED))
                print(f"{name}: no wait for the GPU in {CHECKED} tokens", flush=True)
            for batch in () if arguments.sync_check else arguments.batches:
                for name, times in measure(engines, names, batch, arguments).items():
                    report(name, batch, times, arguments)


def program(name: str, folder: Path, arguments: argparse.Namespace) -> Program:
    environment = {}
    if arguments.sync_check:
        environment["VLLM_GPU_SYNC_CHECK"] = "error"
    if name == "stock_v1":
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if name == "entry_point":  # the three lines of docs/vllm.md
        write_entry_point(folder, "vllm.logits_processors", "reset", PROCESSOR)
        path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
    return Program([sys.executable, *sys.argv, "--engine", name], environment)


def question(batch: int, on: bool, tokens: int) -> dict[str, Any]:
    return {"batch": batch, "on": on, "tokens": tokens}


def measure(
    engines: Engines, names: list[str], batch: int, arguments: argparse.Namespace
) -> dict[str, Times]:
    """Times per token in ms, {name: {"off": [...], "on": [...]}}."""
    times: dict[str, Times] = {name: {"off": [], "on": []} for name in names}
    for pair in range(arguments.pairs):
        for name in reversed(names) if pair % 2 else names:
            states = [False] if name in STOCK else [False, True]
            for on in reversed(states) if pair % 2 else states:
                value = engines.ask(name, question(batch, on, LAST))
                times[name]["on" if on else "off"].append(value)
    return times


def start_engine(folder: Path, arguments: argparse.Namespace) -> tuple[Any, Answer]:
    """In an engine's process: None when it is ready, and what answers `question`."""
    engine = make_engine(folder, arguments)

    def ms_per_token(batch: int, on: bool, tokens: int) -> float | None:
        times = decode(engine, batch, PROMPT, tokens, reset=on, temperature=1.0, top_p=0.95)
        return times.get("tpot_ms")

    # A check of waits sees the requests of the check alone.
    for batch in () if arguments.sync_check else arguments.batches:
        for on in [False] if arguments.engine in STOCK else [False, True]:
            ms_per_token(batch, on, WARM)
    return None, lambda asked: ms_per_token(**asked)


def make_engine(folder: Path, arguments: argparse.Namespace) -> Any:
    import torch
    from vllm import LLM

    requests = max(arguments.batches)
    kv = random_model.kv_bytes(arguments.shape, requests, LENGTH)
    options = random_model.memory_options(kv)
    if arguments.engine not in STOCK:
        options["additional_config"] = {"reset": {"tokenizer": arguments.tokenizer}}
    if arguments.engine == "name":
        options["logits_processors"] = [PROCESSOR]
    if not torch.cuda.is_available():
        options["enforce_eager"] = True
    config = random_model.config(arguments.shape, nvfp4=not arguments.plain)
    (folder / "config.json").write_text(json.dumps(config))
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=LENGTH,
        max_num_seqs=requests,
        enable_prefix_caching=False,
        seed=0,
        **options,
    ).llm_engine


def report(loaded: str, batch: int, times: Times, arguments: argparse.Namespace) -> None:
    ratios = [on / off for off, on in zip(times["off"], times["on"], strict=False)]
    for state, values in times.items():
        if not values:
            continue
        record(
            "reset_vllm",
            loaded if loaded in STOCK else f"{loaded}_{state}",
            model=arguments.shape,
            weights="bfloat16" if arguments.plain else "nvfp4",
            batch=batch,
            tpot_ms=statistics.median(values),
            pairs=arguments.pairs,
            on_over_off=statistics.median(ratios) if ratios else None,
            lowest_ratio=min(ratios) if ratios else None,
            highest_ratio=max(ratios) if ratios else None,
        )


if __name__ == "__main__":
    main()
