"""What a decode step is made of: the timelines that `e2e.py --profile` writes, by kind of kernel.

    python benchmarks/timeline.py FOLDER

Reads every MODEL-ENGINE.json or .json.gz of the folder and records, for each kind of kernel,
medians over the whole steps in it. A step goes from the start of the kernel that looks up the
embedding to the start of the next one. Where kernels overlap (programmatic dependent launch) the
time belongs to the one that began first: `us` are parts of a union of intervals, `sum_us` the
durations one by one, `idle_us` the time before kernels of that kind in which nothing ran. So `us`
and `idle_us` of all kinds and the `waiting_us` for the host make up the step. The profiler slows
the host down, which is why its waiting stands apart.

What a kernel is for is told by its name, and where names do not tell by its place: the last product
of a step is the output head, the others are a decoder block's four layers in turn, and the
compiler's kernels without a name belong to queries and keys if the cache is written after them. A
kernel that nobody knows is a kind of its own, under its own name.

Machine, versions and time per token are those of the engine's lines in results/e2e.jsonl.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness

MACHINE = ("gpu", "driver", "cpu", "threads", "python", "torch", "vllm", "git", "date")
ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_US = 20.0  # nothing runs for so long only where the host has not launched the next kernel
LAYERS = ("qkv", "o", "gate_up", "down")  # a block's products, in their order
HEAD, PRODUCT, UNNAMED = "output head", "product", "unnamed"
CACHE_WRITE, QK = "cache write", "query and key norms, rotary embedding"
EMBEDDING, NORM, SILU = "embedding and first norm", "residual and norm", "SiLU and product"
COMBINE = "attention, combining its parts"
ROUND_OFF = r"cublasLt::splitKreduce_kernel"  # the end of the product before it
PRODUCTS = (r"linear_(small|medium|large)_", r"marlin::Marlin<", r"nvjet_sm\d+_", ROUND_OFF)
KINDS = (
    (PRODUCT, "|".join(PRODUCTS)),
    ("activations rounded or arranged", r"^(quantize|arrange)_"),
    ("attention", r"flash::FlashAttnFwdSm90<"),
    (COMBINE, r"flash::FlashAttnFwdCombine<"),
    (CACHE_WRITE, r"vllm::reshape_and_cache_flash_kernel<"),
    (EMBEDDING, r"^triton_\w*embedding\w*rms_norm"),
    (NORM, r"^triton_\w*fused_add_rms_norm"),
    (SILU, r"^triton_\w*mul_silu"),
    (UNNAMED, r"^triton_(red|poi|per)_fused_\d+$"),
    ("sampling", r"^_gumbel_sample_kernel|ArgMaxOps<|_scatter_gather_elementwise_kernel<"),
    (
        "requests and their tables",
        r"^_(prepare_pos_seq_lens|combine_sampled_and_draft_tokens|gather_block_tables"
        r"|compute_slot_mappings|get_num_sampled_and_rejected|post_update|apply_write)_kernel"
        r"|flash::prepare_varlen_num_blocks_kernel<|at::native::index_elementwise_kernel<",
    ),
    ("copies and fills", r"^Mem(cpy|set) |^memcpy32_post|FillFunctor<|arange_cuda_out"),
)


@dataclass(frozen=True)
class Kernel:
    """What the GPU did between two moments, in microseconds of the trace's clock."""

    name: str
    start: float
    end: float


@dataclass
class Share:
    """What kernels of one kind take in a step, in microseconds."""

    us: float = 0.0
    sum_us: float = 0.0
    idle_us: float = 0.0
    launches: int = 0


def read_kernels(path: Path) -> list[Kernel]:
    """Everything that ran on the GPU, copies and fills as well, in the order of their starts."""
    data = path.read_bytes()
    events = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    kernels = [
        Kernel(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ON_THE_GPU
    ]
    return sorted(kernels, key=lambda kernel: kernel.start)


def kind_of(name: str) -> str:
    """By the name alone; what nobody knows is its own kind, without arguments of templates."""
    for kind, pattern in KINDS:
        if re.search(pattern, name):
            return kind
    return name.removeprefix("void ").partition("<")[0]


def steps_of(kernels: list[Kernel]) -> list[tuple[list[Kernel], float]]:
    """The whole steps: their kernels, and the microseconds from one's start to the next one's.

    Raises:
        ValueError: less than two steps begin in the trace.
    """
    starts = [i for i, kernel in enumerate(kernels) if kind_of(kernel.name) == EMBEDDING]
    if len(starts) < 2:
        raise ValueError(
            f"{len(starts)} steps begin with a kernel like triton_..._embedding_..._rms_norm, need "
            "2 or more; take a trace of a decoder that torch.compile has compiled"
        )
    return [
        (kernels[begin:end], kernels[end].start - kernels[begin].start)
        for begin, end in pairwise(starts)
    ]


def kinds_of(step: list[Kernel]) -> list[str]:
    """The kind of every kernel of one step, by name and place.

    Raises:
        ValueError: the products before the last are not four a block.
    """
    kinds = [kind_of(kernel.name) for kernel in step]
    products = [
        i
        for i, kind in enumerate(kinds)
        if kind == PRODUCT and not re.search(ROUND_OFF, step[i].name)
    ]
    if len(products) % len(LAYERS) != 1:
        raise ValueError(
            f"a step has {len(products)} products, need {len(LAYERS)} a block and the output head; "
            "this model has other layers, or a kernel of theirs is missing in PRODUCTS"
        )
    for number, (begin, end) in enumerate(pairwise([*products, len(step)])):
        name = HEAD if begin == products[-1] else LAYERS[number % len(LAYERS)]
        kinds[begin:end] = [name if kind == PRODUCT else kind for kind in kinds[begin:end]]
    following = ""
    for i in reversed(range(len(step))):
        if kinds[i] == UNNAMED:
            kinds[i] = QK if following in (CACHE_WRITE, QK) else step[i].name
        following = kinds[i]
    return kinds


def shares(step: list[Kernel]) -> tuple[dict[str, Share], float]:
    """What each kind takes, and how long the GPU waited for the host, up to the last kernel."""
    found: dict[str, Share] = defaultdict(Share)
    waiting, reached = 0.0, step[0].start
    for kernel, kind in zip(step, kinds_of(step), strict=True):
        share = found[kind]
        idle = max(0.0, kernel.start - reached)
        if idle > HOST_US:
            waiting += idle
        else:
            share.idle_us += idle
        share.us += max(0.0, kernel.end - max(kernel.start, reached))
        share.sum_us += kernel.end - kernel.start
        share.launches += 1
        reached = max(reached, kernel.end)
    return dict(found), waiting


def account(kernels: list[Kernel]) -> tuple[dict[str, Share], dict[str, float]]:
    """Medians over the steps: of every kind, and of a step as a whole.

    The time from a step's last kernel to the next step is idle before the latter's first kind, or
    waiting for the host.
    """
    every, totals = [], []
    for step, length in steps_of(kernels):
        found, waiting = shares(step)
        rest = max(0.0, length - (max(kernel.end for kernel in step) - step[0].start))
        if rest > HOST_US:
            waiting += rest
        else:
            found[EMBEDDING].idle_us += rest
        every.append(found)
        totals.append(
            {
                "step_us": length,
                "waiting_us": waiting,
                "busy_us": sum(share.us for share in found.values()),
                "idle_us": sum(share.idle_us for share in found.values()),
                "launches": len(step),
            }
        )
    kinds = dict.fromkeys(kind for found in every for kind in found)
    none = Share()

    def median(kind: str, field: str) -> float:
        return float(statistics.median(getattr(found.get(kind, none), field) for found in every))

    parts = {
        kind: Share(
            us=median(kind, "us"),
            sum_us=median(kind, "sum_us"),
            idle_us=median(kind, "idle_us"),
            launches=round(median(kind, "launches")),
        )
        for kind in kinds
    }
    whole = {key: statistics.median(total[key] for total in totals) for key in totals[0]}
    return parts, whole | {"steps": len(totals)}


def measured(stem: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The line of results/e2e.jsonl for the first case of the newest run of this engine.

    Raises:
        ValueError: there is none, or the run wrote no timelines.
    """
    own = [line for line in lines if f"{line['model']}-{line['impl']}" == stem]
    if not own:
        raise ValueError(
            f"{stem} has no line in results/e2e.jsonl; name the trace MODEL-ENGINE.json as "
            "`python benchmarks/e2e.py --profile FOLDER` does, and keep the lines of that run"
        )
    command = own[-1]["command"]
    if "--profile" not in command:
        raise ValueError(
            f"the newest run of {stem} in results/e2e.jsonl wrote no timelines: {command}; "
            "run it with --profile FOLDER"
        )
    run = [line for line in own if line["command"] == command]
    case = run[0]["batch"], run[0]["prompt"]
    return [line for line in run if (line["batch"], line["prompt"]) == case][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what e2e.py --profile wrote")
    folder: Path = parser.parse_args().folder
    files = sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")])
    if not files:
        parser.error(f"{folder} has no .json or .json.gz; run e2e.py with --profile {folder}")
    text = (harness.RESULTS / "e2e.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    for path in files:
        stem = path.name.removesuffix(".gz").removesuffix(".json")
        try:
            line = measured(stem, lines)
            parts, whole = account(read_kernels(path))
        except ValueError as error:
            parser.error(f"{path}: {error}")
        facts = {key: line[key] for key in (*MACHINE, "command")}
        facts["command"] += " && python benchmarks/timeline.py FOLDER"
        what = {"model": line["model"], "batch": line["batch"], "prompt": line["prompt"]}
        harness.record(
            "timeline", line["impl"], facts, **what, part="step", **whole, tpot_ms=line["tpot_ms"]
        )
        for part, share in parts.items():
            harness.record("timeline", line["impl"], facts, **what, part=part, **vars(share))


if __name__ == "__main__":
    main()
