"""Decoding in vLLM from end to end: bfloat16, NVFP4 by vLLM's own kernels, NVFP4 by nvfp4r.

    python benchmarks/vllm_e2e.py --shape qwen3-8b qwen3-32b

Models of Qwen3's shapes with random weights and no download, prompts of 512 random tokens,
temperature 0. Time per output token is that of tokens 33 .. 288; time to first token is the time
from handing over the prompts to the last request's first token; both are medians over --repeats.
Each engine has a process of its own; `nvfp4r` is `stock` with NVFP4R=1. Loading is measured without
the making of the weights; memory is torch's peak while loading, and what the model holds after it.

A model loader of this file (vLLM's register_model_loader) fills the parameters: codes uniform,
block scales uniform over E4M3's bytes for 1.0 to 3.75, global and input scales 2^-8, norms 1, the
rest normal with deviation 0.02. vLLM's load_format="dummy" would leave block scales that are zero
or negative, which NVFP4 does not have.

--profile FOLDER writes a timeline of 16 decode steps at the first batch size there, one file for
each engine, and prints the kernels that take most of it. --reset FOLDER decodes with ReSET on,
finding step borders with the tokenizer in that folder. --shape tiny tries the program on a CPU.
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
from importlib import metadata
from pathlib import Path
from typing import Any

from harness import record
from vllm_overhead import NVFP4, PROCESSOR, QWEN3, REQUEST
from vllm_overhead import SHAPES as KNOWN_SHAPES

MARK = "FIGURES "
IMPLS = ("bf16", "stock", "nvfp4r")
PROMPT, FIRST, LAST = 512, 32, 288  # tokens
_LARGE = {"hidden_size": 5120, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
SHAPES: dict[str, dict[str, int]] = {
    **KNOWN_SHAPES,
    "qwen3-14b": {
        **_LARGE,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "qwen3-32b": {
        **_LARGE,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
}
SCALE = 2.0**-8
ONE, ABOVE = 0x38, 0x48  # bytes of E4M3: 1.0, and the one after 3.75


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", default=["qwen3-8b", "qwen3-32b"], choices=SHAPES)
    parser.add_argument("--impl", nargs="+", default=list(IMPLS), choices=IMPLS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=LAST, help="output tokens of a request")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--activations", default="auto", choices=("auto", "nvfp4", "none"))
    parser.add_argument("--quantised-head", action="store_true", help="lm_head in NVFP4 too")
    parser.add_argument("--reset", help="folder of a tokenizer; decode with ReSET on")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # in a child
    arguments = parser.parse_args()
    if arguments.tokens <= FIRST:
        parser.error(f"--tokens is {arguments.tokens}, need more than {FIRST}")
    if arguments.measure:
        shape, impl = arguments.measure.split("/")
        print(MARK + json.dumps(measure(shape, impl, arguments)), flush=True)
        return
    for shape in arguments.shape:
        for impl in arguments.impl:
            report(shape, impl, in_a_child(shape, impl, arguments), arguments)


def in_a_child(shape: str, impl: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of one engine in a process of its own."""
    environment = {
        **os.environ,
        "NVFP4R": "1" if impl == "nvfp4r" else "0",
        "NVFP4R_ACTIVATIONS": arguments.activations,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this program's loader and figures are in reach
    }
    with tempfile.TemporaryDirectory() as folder:
        path = [folder, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        write_entry_point(Path(folder))
        command = [sys.executable, *sys.argv, "--measure", f"{shape}/{impl}"]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        sys.exit(f"{shape} {impl}: exit code {done.returncode}\n{done.stdout[-4000:]}")
    sys.stdout.write("".join(f"{x}\n" for x in done.stdout.splitlines() if x.startswith("  ")))
    figures: dict[str, Any] = json.loads(lines[0].removeprefix(MARK))
    return figures


def write_entry_point(folder: Path) -> None:
    """What installing the package does; not needed where it is installed."""
    group = "vllm.general_plugins"
    if any(entry.name == "nvfp4r" for entry in metadata.entry_points(group=group)):
        return
    info = folder / "nvfp4r_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: nvfp4r-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{group}]\nnvfp4r = nvfp4r.vllm:register\n")


def measure(shape: str, impl: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """{"load": {...}, "layers": groups, "batches": {batch: {"tpot_ms": [...], ...}}}."""
    import nvfp4r

    figures: dict[str, Any] = {"load": {}, "batches": {}}
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(Path(folder), shape, impl, arguments, figures["load"])
        figures["layers"] = sum(
            int(name.rpartition(" x ")[2]) if " x " in name else 1
            for group in nvfp4r.status().groups
            for name in group.layers
        )
        if (figures["layers"] > 0) != (impl == "nvfp4r"):
            sys.exit(f"{impl}: {figures['layers']} layers run on nvfp4r\n{nvfp4r.status()}")
        for batch in arguments.batches:
            times: dict[str, list[float]] = {"tpot_ms": [], "ttft_ms": []}
            for repeat in range(-1, arguments.repeats):
                ttft, tpot = decode(engine, batch, arguments)
                if repeat >= 0:  # the first warms up
                    times["ttft_ms"].append(ttft)
                    times["tpot_ms"].append(tpot)
            figures["batches"][str(batch)] = times
        if arguments.profile:
            arguments.profile.mkdir(parents=True, exist_ok=True)
            profile(engine, arguments.profile / f"{shape}-{impl}.json", arguments)
    return figures


def make_engine(
    folder: Path, shape: str, impl: str, arguments: argparse.Namespace, load: dict[str, float]
) -> Any:
    import torch
    from vllm import LLM

    config = {**QWEN3, **SHAPES[shape]}
    if impl != "bf16":
        ignore = [] if arguments.quantised_head else ["lm_head"]
        config["quantization_config"] = {**NVFP4, "ignore": ignore}
    (folder / "config.json").write_text(json.dumps(config))
    register_loader(load)
    options: dict[str, Any] = {}
    if arguments.reset:
        options["logits_processors"] = [PROCESSOR]
        options["additional_config"] = {"reset": {"tokenizer": arguments.reset}}
    if not torch.cuda.is_available():
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
    start = time.perf_counter()
    engine = LLM(
        model=str(folder),
        load_format="random",
        skip_tokenizer_init=True,
        max_model_len=PROMPT + arguments.tokens + 16,
        max_num_seqs=max(arguments.batches),
        enable_prefix_caching=False,
        seed=0,
        **options,
    ).llm_engine
    load["start_s"] = time.perf_counter() - start
    return engine


def register_loader(load: dict[str, float]) -> None:
    """The load format "random"; writes times and memory of loading into `load`."""
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    has_gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if has_gpu else lambda: None

    @register_model_loader("random")
    class RandomLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            start = time.perf_counter()
            torch.manual_seed(0)
            for name, parameter in model.named_parameters():
                fill(name, parameter.data)
            wait()
            load["fill_s"] = time.perf_counter() - start

        def load_model(self, *positional: Any, **named: Any) -> torch.nn.Module:
            if has_gpu:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            model: torch.nn.Module = super().load_model(*positional, **named)
            wait()
            load["load_s"] = time.perf_counter() - start - load["fill_s"]
            if has_gpu:
                load["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
                load["weights_gb"] = torch.cuda.memory_allocated() / 1e9
            return model

    def fill(name: str, data: torch.Tensor) -> None:
        if data.dtype == torch.uint8:
            data.random_(0, 256)
        elif data.dtype == torch.float8_e4m3fn:
            data.view(torch.uint8).random_(ONE, ABOVE)
        elif name.endswith(("weight_scale_2", "input_scale")):
            data.fill_(SCALE)
        elif data.ndim == 1:
            data.fill_(1.0)
        else:
            data.normal_(std=0.02)


def decode(engine: Any, batch: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """(time to first token, time per step between output tokens FIRST and the last), in ms."""
    start = time.perf_counter()
    hand_over(engine, batch, arguments)
    lengths: dict[str, int] = {}
    first = began = None
    reached = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            lengths[output.request_id] = len(output.outputs[0].token_ids)
        fewest = min(lengths.values()) if len(lengths) == batch else 0
        if first is None and fewest >= 1:
            first = time.perf_counter()
        if began is None and fewest >= FIRST:
            began, reached = time.perf_counter(), fewest
    end = time.perf_counter()
    assert first is not None
    assert began is not None
    return (first - start) * 1e3, (end - began) / (arguments.tokens - reached) * 1e3


def hand_over(engine: Any, batch: int, arguments: argparse.Namespace) -> None:
    from vllm import SamplingParams

    picks = random.Random(batch)
    width = engine.model_config.get_vocab_size()
    for index in range(batch):
        params = SamplingParams(
            temperature=1.0 if arguments.reset else 0.0,
            max_tokens=arguments.tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=dict(REQUEST) if arguments.reset else None,
        )
        ids = [picks.randrange(width) for _ in range(PROMPT)]
        name = f"{index}-{time.monotonic_ns()}"
        engine.add_request(name, {"prompt_token_ids": ids}, params)


def profile(engine: Any, file: Path, arguments: argparse.Namespace) -> None:
    """A timeline of 16 decode steps, and the kernels that take most of them."""
    import torch

    has_gpu = torch.cuda.is_available()
    hand_over(engine, arguments.batches[0], arguments)
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
    table = seen.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=80)
    print("\n".join(f"  {line}" for line in table.splitlines()))


def report(shape: str, impl: str, figures: dict[str, Any], arguments: argparse.Namespace) -> None:
    for batch, times in figures["batches"].items():
        tpot, ttft = times["tpot_ms"], times["ttft_ms"]
        record(
            "e2e",
            impl,
            model=shape,
            batch=int(batch),
            tpot_ms=statistics.median(tpot),
            lowest_tpot_ms=min(tpot),
            highest_tpot_ms=max(tpot),
            ttft_ms=statistics.median(ttft),
            repeats=len(tpot),
            tokens=arguments.tokens,
            activations=arguments.activations if impl == "nvfp4r" else None,
            quantised_head=arguments.quantised_head and impl != "bf16",
            reset=bool(arguments.reset),
            layers=figures["layers"],
            **figures["load"],
        )


if __name__ == "__main__":
    main()
