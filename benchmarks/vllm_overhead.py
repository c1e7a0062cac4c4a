"""What ReSET adds to decoding in vLLM: time per output token with it off and on, same engine.

    python benchmarks/vllm_overhead.py --tokenizer .cache/smollm2-135m

A model of Qwen3-8B's shape with random NVFP4 weights (--plain: bfloat16), prompts of 512 random
tokens, temperature 1.0, top-p 0.95; the time per token of tokens 33 .. 288. Four engines, one after
the other: stock, as vLLM chooses its runner; stock_v1, on the V1 runner, which vLLM < 0.31 needs
for any logits processor; and ReSET loaded by name and by entry point. In the latter two, runs with
ReSET on and off for all requests come in pairs, in turn off-on and on-off. Goal: the median of the
pairs' ratios is at most 1.02.

--sync-check runs a few tokens with VLLM_GPU_SYNC_CHECK=error instead and measures nothing. --shape
tiny --plain tries the program on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import record

MARK = "FIGURES "
PROCESSOR = "reset.vllm:ReSETLogitsProcessor"
STOCK = ("stock", "stock_v1")
LOADED = (*STOCK, "name", "entry_point")
REQUEST = {"reset": 1, "t_low": 0.1, "t_high": 1.0, "tau_0": 0.5505}
PROMPT, FIRST, LAST = 512, 32, 288  # tokens

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES: dict[str, dict[str, int]] = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 49152,
    },
}
_NVFP4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
NVFP4 = {
    "config_groups": {
        "group_0": {"input_activations": _NVFP4, "weights": _NVFP4, "targets": ["Linear"]}
    },
    "ignore": ["lm_head"],
    "quant_algo": "NVFP4",
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quant_method": "modelopt",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True, help="folder; finds the step borders")
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--plain", action="store_true", help="bfloat16 weights")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--loaded", nargs="+", default=list(LOADED), choices=LOADED)
    parser.add_argument("--sync-check", action="store_true")
    parser.add_argument("--measure", choices=LOADED, help=argparse.SUPPRESS)  # in a child
    arguments = parser.parse_args()
    if arguments.measure:
        print(MARK + json.dumps(measure(arguments)), flush=True)
        return
    for loaded in arguments.loaded:
        figures = in_a_child(loaded, arguments)
        if arguments.sync_check:
            print(f"{loaded}: no wait for the GPU in {figures['tokens']} tokens")
            continue
        for batch, times in figures.items():
            report(loaded, int(batch), times, arguments)


def in_a_child(loaded: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of one engine in a process of its own."""
    environment = dict(os.environ)
    if arguments.sync_check:
        environment["VLLM_GPU_SYNC_CHECK"] = "error"
    if loaded == "stock_v1":
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        if loaded == "entry_point":
            write_entry_point(Path(folder))
            path = [folder, *filter(None, [environment.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(path)
        command = [sys.executable, *sys.argv, "--measure", loaded]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        sys.exit(f"{loaded}: exit code {done.returncode}\n{done.stdout[-4000:]}")
    figures: dict[str, Any] = json.loads(lines[0].removeprefix(MARK))
    return figures


def write_entry_point(folder: Path) -> None:
    """The three lines of docs/vllm.md."""
    info = folder / "reset_vllm-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: reset-vllm\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.logits_processors]\nreset = {PROCESSOR}\n")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Times per token in ms, {batch: {"off": [...], "on": [...]}}; in the child."""
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(Path(folder), arguments)
        states = [False] if arguments.measure in STOCK else [False, True]
        if arguments.sync_check:
            ms_per_token(engine, max(arguments.batches), states[-1], last=FIRST + 32)
            return {"tokens": FIRST + 32}
        figures: dict[str, Any] = {}
        for batch in arguments.batches:
            times: dict[str, list[float]] = {"off": [], "on": []}
            for pair in range(-1, arguments.pairs):
                for on in states if pair % 2 else reversed(states):
                    value = ms_per_token(engine, batch, on)
                    if pair >= 0:  # the first pair warms up
                        times["on" if on else "off"].append(value)
            figures[str(batch)] = times
        return figures


def make_engine(folder: Path, arguments: argparse.Namespace) -> Any:
    import torch
    from vllm import LLM

    config = {**QWEN3, **SHAPES[arguments.shape]}
    if not arguments.plain:
        config["quantization_config"] = NVFP4
    (folder / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = {}
    if arguments.measure not in STOCK:
        options["additional_config"] = {"reset": {"tokenizer": arguments.tokenizer}}
    if arguments.measure == "name":
        options["logits_processors"] = [PROCESSOR]
    if not torch.cuda.is_available():
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=max(arguments.batches),
        enable_prefix_caching=False,
        seed=0,
        **options,
    ).llm_engine


def ms_per_token(engine: Any, batch: int, on: bool, last: int = LAST) -> float:
    """Decode `batch` prompts at once; time per step between output tokens FIRST and `last`."""
    from vllm import SamplingParams

    picks = random.Random(batch)
    width = engine.model_config.get_vocab_size()
    for index in range(batch):
        params = SamplingParams(
            temperature=1.0,
            top_p=0.95,
            max_tokens=last,
            ignore_eos=True,
            detokenize=False,
            extra_args=dict(REQUEST) if on else None,
        )
        ids = [picks.randrange(width) for _ in range(PROMPT)]
        name = f"{index}-{time.monotonic_ns()}"
        engine.add_request(name, {"prompt_token_ids": ids}, params)
    lengths: dict[str, int] = {}
    began: float | None = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            lengths[output.request_id] = len(output.outputs[0].token_ids)
        if began is None and len(lengths) == batch and min(lengths.values()) >= FIRST:
            began, reached = time.perf_counter(), min(lengths.values())
    assert began is not None
    return (time.perf_counter() - began) / (last - reached) * 1e3


def report(
    loaded: str, batch: int, times: dict[str, list[float]], arguments: argparse.Namespace
) -> None:
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
