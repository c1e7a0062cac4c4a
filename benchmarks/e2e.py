"""Decoding in vLLM from end to end: bfloat16, NVFP4 by vLLM's own kernels, NVFP4 by nvfp4r.

    python benchmarks/e2e.py --shape qwen3-8b qwen3-32b

Models of Qwen3's shapes with random weights and no download (random_model.py), prompts of random
tokens. Time per output token (TPOT) is that of tokens 33 .. --tokens behind a prompt of the first
length of --prompts; time to first token (TTFT) is the time from handing over the prompts to the
last request's first token, and for the other lengths all that is measured, at batch 1.

All engines of a shape start together, each in a process of its own, and are measured in turn, one
after the other in every round: ratios are medians over rounds of two figures of one round. What
does not fit into the GPU at once starts afterwards, beside the engines it is compared with. Loading
is measured without the making of the weights, while the others load too; memory is torch's peak
while loading, and what the model holds after it.

`nvfp4r` is `stock` with NVFP4R=1. --reset FOLDER adds `stock+reset` and `nvfp4r+reset`, or those of
--reset-impl: they decode with ReSET on at temperature 1 and find step borders with the tokenizer in
that folder; the others decode at --temperature. In every round these decode once more with ReSET
off: vLLM 0.26 to 0.30 runs a model with a logits processor on its V1 runner and one without on V2,
so that the ratio to the plain engine holds the change of runners as well. --quantised-head
adds `nvfp4r+head`, its lm_head in NVFP4 too.

vLLM captures CUDA graphs for up to twice as many tokens as there may be requests, at most 512: here
there are few requests, in a server 256 or more. So prompts have graphs too, those of a server; with
--graphs-up-to 0 they are launched kernel by kernel, as in a server with --max-num-seqs so small.

--profile FOLDER writes a timeline of 16 decode steps at the first batch size there, one file for
each engine, and prints the kernels that take most of it. --shape tiny tries the program on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import random_model
from decoding import FIRST, PROCESSOR, decode, profile
from engines import Answer, EngineError, Engines, Program, serve, write_entry_point
from harness import record
from table_e2e import verdicts

IMPLS = ("bf16", "stock", "nvfp4r")
PROMPT, LAST, WARM = 512, 160, 4  # tokens
PLUGINS = "vllm.general_plugins"
IN_USE = 0.97  # of the free memory
Case = tuple[int, int]  # batch, prompt
Times = dict[str, list[dict[str, float]]]  # by engine, a round after the other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", nargs="+", default=["qwen3-8b", "qwen3-32b"], choices=random_model.SHAPES
    )
    parser.add_argument("--impl", nargs="+", default=list(IMPLS), choices=IMPLS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--prompts", type=int, nargs="+", default=[PROMPT], help="tokens")
    parser.add_argument("--tokens", type=int, default=LAST, help="output tokens of a request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--activations", default="auto", choices=("auto", "nvfp4", "none"))
    parser.add_argument("--quantised-head", action="store_true", help="lm_head in NVFP4 too")
    parser.add_argument("--reset", help="folder of a tokenizer; decode with ReSET on, too")
    parser.add_argument(
        "--reset-impl",
        nargs="+",
        default=["stock", "nvfp4r"],
        choices=("stock", "nvfp4r"),
        help="which of them decode with ReSET too, if --reset is given",
    )
    parser.add_argument("--graphs-up-to", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds")
    parser.add_argument("--logs", type=Path, help="folder that keeps what the engines print")
    parser.add_argument("--engine", help=argparse.SUPPRESS)  # in an engine's process
    arguments = parser.parse_args()
    if arguments.tokens <= FIRST:
        parser.error(f"--tokens is {arguments.tokens}, need more than {FIRST}")
    for flag, least in (("batches", 1), ("prompts", 1), ("repeats", 1), ("graphs_up_to", 0)):
        given = getattr(arguments, flag)
        if min(given if isinstance(given, list) else [given]) < least:
            parser.error(f"--{flag.replace('_', '-')} is {given}, need {least} or more")
    if arguments.engine:
        shape, name = arguments.engine.split("/")
        with tempfile.TemporaryDirectory() as folder:
            serve(lambda: start_engine(Path(folder), shape, name, arguments))
        return
    if arguments.reset and not Path(arguments.reset).is_dir():
        parser.error(f"--reset {arguments.reset} is no folder; give that of a tokenizer")
    try:
        plans = {shape: plan(shape, arguments) for shape in arguments.shape}
    except ValueError as error:
        parser.error(str(error))
    try:
        for shape, groups in plans.items():
            compare(shape, groups, arguments)
    except EngineError as error:
        sys.exit(str(error))


def plan(shape: str, arguments: argparse.Namespace) -> list[list[str]]:
    """Which engines of a shape run at once on this machine."""
    names = engine_names(arguments)
    sizes = {name: size(shape, name, arguments) for name in names}
    groups = waves(names, sizes, int(free_bytes() * IN_USE))
    if len(groups) > 1:
        order = "; then ".join(map(", ".join, groups))
        print(f"{shape}: not all at once, for want of memory: {order}", flush=True)
    return groups


def compare(shape: str, groups: list[list[str]], arguments: argparse.Namespace) -> None:
    """Measure every engine of a shape, and record each case as soon as it is done."""
    recorded: set[str] = set()
    running: list[str] = []
    reports: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        logs = (arguments.logs or folder / "logs") / shape
        with Engines(folder / "caches", logs, arguments.start_timeout) as engines:
            for wave in groups:
                engines.stop(*(name for name in running if name not in wave))
                new = [name for name in wave if name not in running]
                began = time.monotonic()
                reports |= engines.start(programs(shape, new, folder, arguments))
                took = time.monotonic() - began
                print(f"{shape}: {', '.join(new)} ready in {took:.0f} s", flush=True)
                running = wave
                for case in cases(arguments):
                    times = measure(engines, wave, case, arguments)
                    for name in wave:
                        if name not in recorded:
                            report(shape, name, case, reports[name], times, arguments)
                recorded.update(wave)
                if arguments.profile:
                    write_timelines(engines, shape, new, arguments)


def engine_names(arguments: argparse.Namespace) -> list[str]:
    names = list(dict.fromkeys(arguments.impl))
    if arguments.reset:
        names += [f"{name}+reset" for name in arguments.impl if name in arguments.reset_impl]
    if arguments.quantised_head and "nvfp4r" in names:
        names.append("nvfp4r+head")
    return names


def waves(names: list[str], sizes: dict[str, int], room: int) -> list[list[str]]:
    """Which engines run at once: all, or those that fit first and the rest afterwards.

    An engine NAME+SOMETHING of a later wave stands beside NAME, which goes on or starts again.

    Raises:
        ValueError: an engine, and the one that it is compared with, need more than there is.
    """
    groups: list[list[str]] = []
    left = list(names)
    while left:
        wave: list[str] = []
        for name in left:
            base = name.partition("+")[0]
            needed = [x for x in dict.fromkeys((base, name)) if x in names and x not in wave]
            if sum(sizes[x] for x in [*wave, *needed]) <= room:
                wave += needed
        if not wave:
            need, have = (f"{value / 2**30:.0f} GiB" for value in (sizes[left[0]], room))
            raise ValueError(f"{left[0]} needs about {need}, there are {have}; leave it out")
        groups.append(wave)
        left = [name for name in left if name not in wave]
    return groups


def free_bytes() -> int:
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def lengths(arguments: argparse.Namespace) -> dict[str, int]:
    """vLLM's limits: exactly what the cases need."""
    first = arguments.prompts[0]
    return {
        "max_model_len": max(first + arguments.tokens, *(x + WARM for x in arguments.prompts)) + 16,
        "max_num_batched_tokens": max(first * max(arguments.batches), *arguments.prompts),
        "max_num_seqs": max(arguments.batches),
    }


def graph_sizes(arguments: argparse.Namespace) -> list[int]:
    """Tokens that have a CUDA graph: of vLLM's own numbers, those for so many requests, and for
    the prompts of each case up to --graphs-up-to."""
    few, many = 2 * max(arguments.batches), arguments.graphs_up_to
    usual = [1, 2, 4, *range(8, 256, 8), *range(256, max(few, many) + 1, 16)]
    prompts = (batch * prompt for batch, prompt in cases(arguments))
    needed = {min(n for n in usual if n >= x) for x in prompts if x <= min(many, usual[-1])}
    return sorted({*needed, *(n for n in usual if n <= few)})


def cache_bytes(shape: str, arguments: argparse.Namespace) -> int:
    """For all prompts of the largest batch, or the one longest."""
    batch, short = max(arguments.batches), arguments.prompts[0] + arguments.tokens + 16
    longest = lengths(arguments)["max_model_len"]
    return max(random_model.kv_bytes(shape, batch, short), random_model.kv_bytes(shape, 1, longest))


def size(shape: str, name: str, arguments: argparse.Namespace) -> int:
    return random_model.engine_bytes(
        shape,
        cache_bytes(shape, arguments),
        lengths(arguments)["max_num_batched_tokens"],
        nvfp4=name != "bf16",
        quantised_head=name.endswith("+head"),
    )


def programs(
    shape: str, names: list[str], folder: Path, arguments: argparse.Namespace
) -> dict[str, Program]:
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    if not any(entry.name == "nvfp4r" for entry in metadata.entry_points(group=PLUGINS)):
        write_entry_point(folder, PLUGINS, "nvfp4r", "nvfp4r.vllm:register")
    return {
        name: Program(
            [sys.executable, *sys.argv, "--engine", f"{shape}/{name}"],
            {
                "NVFP4R": "1" if name.startswith("nvfp4r") else "0",
                "NVFP4R_ACTIVATIONS": arguments.activations,
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # our loader and figures are in reach
                "PYTHONPATH": os.pathsep.join(path),
            },
        )
        for name in names
    }


def cases(arguments: argparse.Namespace) -> list[Case]:
    first, *others = arguments.prompts
    return [*((batch, first) for batch in arguments.batches), *((1, prompt) for prompt in others)]


def measure(engines: Engines, names: list[str], case: Case, arguments: argparse.Namespace) -> Times:
    """Every engine in turn, and again for every repeat; every second round backwards.

    An engine with ReSET has `off_tpot_ms` too, where there is a time per token.
    """
    batch, prompt = case
    tokens = output_tokens(case, arguments)
    question = {"batch": batch, "prompt": prompt, "tokens": tokens}
    times: Times = {name: [] for name in names}
    for repeat in range(arguments.repeats):
        for name in reversed(names) if repeat % 2 else names:
            has_off = name.endswith("+reset") and tokens > FIRST
            states = [False, True] if has_off else [name.endswith("+reset")]
            figures: dict[str, float] = {}
            for on in reversed(states) if repeat % 2 else states:
                found = engines.ask(name, {**question, "reset": on})
                figures |= {"off_tpot_ms": found["tpot_ms"]} if has_off and not on else found
            times[name].append(figures)
    return times


def output_tokens(case: Case, arguments: argparse.Namespace) -> int:
    return int(arguments.tokens) if case[1] == arguments.prompts[0] else 1


def start_engine(
    folder: Path, shape: str, name: str, arguments: argparse.Namespace
) -> tuple[Any, Answer]:
    """In an engine's process: what it says when it is ready, and what answers `measure`."""
    import nvfp4r

    load: dict[str, float] = {}
    engine = make_engine(folder, shape, name, arguments, load)
    layers = sum(
        int(layer.rpartition(" x ")[2]) if " x " in layer else 1
        for group in nvfp4r.status().groups
        for layer in group.layers
    )
    if (layers > 0) != name.startswith("nvfp4r"):
        sys.exit(f"{name}: {layers} layers run on nvfp4r\n{nvfp4r.status()}")
    reset = name.endswith("+reset")
    sampling = {"temperature": 1.0 if reset else arguments.temperature}

    def answer(question: dict[str, Any]) -> Any:
        batch, prompt = question["batch"], question["prompt"]
        if "profile" in question:
            return profile(
                engine, batch, prompt, Path(question["profile"]), reset=reset, **sampling
            )
        on = question["reset"]
        decode(engine, batch, prompt, 1, reset=on, **sampling)  # the clocks may have rested
        return decode(engine, batch, prompt, question["tokens"], reset=on, **sampling)

    for batch, prompt in cases(arguments):
        for on in [False, True] if reset else [False]:
            decode(engine, batch, prompt, WARM, reset=on, **sampling)
    return {"load": load, "layers": layers}, answer


def make_engine(
    folder: Path, shape: str, name: str, arguments: argparse.Namespace, load: dict[str, float]
) -> Any:
    import torch
    from vllm import LLM

    random_model.register_loader(load)
    options = {**lengths(arguments), **random_model.memory_options(cache_bytes(shape, arguments))}
    if name.endswith("+reset"):
        options["logits_processors"] = [PROCESSOR]
        options["additional_config"] = {"reset": {"tokenizer": arguments.reset}}
    if not torch.cuda.is_available():
        options["enforce_eager"] = True
    else:
        options["compilation_config"] = {"cudagraph_capture_sizes": graph_sizes(arguments)}
    config = random_model.config(shape, nvfp4=name != "bf16", quantised_head=name.endswith("+head"))
    (folder / "config.json").write_text(json.dumps(config))
    start = time.perf_counter()
    engine = LLM(
        model=str(folder),
        load_format="random",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        seed=0,
        **options,
    ).llm_engine
    load["start_s"] = time.perf_counter() - start
    return engine


def write_timelines(
    engines: Engines, shape: str, names: list[str], arguments: argparse.Namespace
) -> None:
    arguments.profile.mkdir(parents=True, exist_ok=True)
    batch, prompt = cases(arguments)[0]
    for name in names:
        file = arguments.profile.resolve() / f"{shape}-{name}.json"
        print(engines.ask(name, {"batch": batch, "prompt": prompt, "profile": str(file)}))


def over(times: Times, name: str, base: str, figure: str) -> float | None:
    """Median over the rounds of `name`'s figure over that of `base`, where both have one."""
    if base not in times or name == base or figure not in times[name][0]:
        return None
    pairs = zip(times[name], times[base], strict=True)
    return statistics.median(mine[figure] / its[figure] for mine, its in pairs)


def over_off(times: list[dict[str, float]]) -> float | None:
    """Median over the rounds of one engine's time per token with ReSET on over that with it off."""
    if "off_tpot_ms" not in times[0]:
        return None
    return statistics.median(one["tpot_ms"] / one["off_tpot_ms"] for one in times)


def report(
    shape: str,
    name: str,
    case: Case,
    facts: dict[str, Any],
    times: Times,
    arguments: argparse.Namespace,
) -> None:
    """Record one engine's figures of a case, and say which goals its ratios meet."""
    plain, _, extra = name.partition("+")
    figures: dict[str, Any] = {}
    for figure in times[name][0]:
        values = [one[figure] for one in times[name]]
        figures[figure] = statistics.median(values)
        figures |= {f"lowest_{figure}": min(values), f"highest_{figure}": max(values)}
    ratios = {
        "over_bf16": over(times, name, "bf16", "tpot_ms"),
        "over_stock": over(times, name, "stock", "tpot_ms"),
        "over_plain": over(times, name, plain, "tpot_ms"),
        "over_off": over_off(times[name]),
        "ttft_over_stock": over(times, name, "stock", "ttft_ms"),
    }
    figures |= {key: value for key, value in ratios.items() if value is not None}
    what = {"model": shape, "batch": case[0], "prompt": case[1]}
    record(
        "e2e",
        name,
        **what,
        **figures,
        repeats=len(times[name]),
        tokens=output_tokens(case, arguments),
        temperature=1.0 if extra == "reset" else arguments.temperature,
        activations=arguments.activations if plain == "nvfp4r" else None,
        quantised_head=extra == "head",
        reset=extra == "reset",
        layers=facts["layers"],
        beside=[other for other in times if other != name],
        **facts["load"],
    )
    for line in verdicts({"impl": name, **what, **ratios}):
        print(f"  {line}", flush=True)


if __name__ == "__main__":
    main()
