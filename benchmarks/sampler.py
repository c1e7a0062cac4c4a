"""The fused sampler on a GPU: microseconds per step in a CUDA graph, beside the memory's floor.

    python benchmarks/sampler.py            # measures and records
    python benchmarks/sampler.py --sweep    # other tile sizes, warps and registers; prints only

`cold`: every call of a graph works on another batch of logits, more than 300 MB in all, so that
none comes from L2. `warm`: all calls work on one batch, as when the layer before has just written
it. The floor reads the logits twice and writes them once, in two launches of Triton kernels that do
nothing else (a sum per tile, then a copy onto themselves), with the fastest of several tile sizes.
Temperatures are all 1.0, so that logits stay what they are however often a graph is replayed; what
is computed does not depend on it. Every path is checked before it is timed.

Goals: scale_logits on 1 to 8 rows of 151,936 float32 logits <= 15 us; on 256 rows <= 1.3 floors.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

from harness import record
from linear import graph_us
from reset import Decision, ReSETConfig, StepDetector, TemperaturePolicy, scale_logits
from reset._triton_launch import REGISTERS, TILE, WARPS, TrackerKernels
from reset.tracker import RequestTracker

VOCABULARY = 151_936
ROWS = (1, 2, 4, 8, 64, 256)
DTYPES = (torch.float32, torch.bfloat16)
ROTATED_BYTES = 320_000_000
CONFIG = ReSETConfig(t_low=1.0, t_high=1.0, tau_0=0.5)
FLOOR_TILES = ((2048, 4), (4096, 8), (8192, 8), (16_384, 16))
SWEPT_TILES = ((2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (16_384, 16))
Step = Callable[[torch.Tensor], object]


@triton.jit
def sum_kernel(data, sums, size, TILE: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    values = tl.load(data + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(sums + tile, tl.sum(values, 0))


@triton.jit
def rewrite_kernel(data, size, TILE: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    tl.store(data + at, tl.load(data + at, mask=at < size), mask=at < size)


def read_twice_write_once(logits: torch.Tensor, sums: torch.Tensor, tile: int, warps: int) -> None:
    size = logits.numel()
    grid = (triton.cdiv(size, tile),)
    sum_kernel[grid](logits, sums, size, TILE=tile, num_warps=warps)
    rewrite_kernel[grid](logits, size, TILE=tile, num_warps=warps)


def random_logits(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, VOCABULARY, device="cuda") * 3).to(dtype)


def detector() -> StepDetector:
    return StepDetector.from_pieces(["a", "\n", ".\n\n"]).padded_to(VOCABULARY)


def new_tracker(rows: int, backend: str, config: ReSETConfig = CONFIG) -> RequestTracker:
    made = RequestTracker(detector(), rows, device="cuda", backend=backend)
    made.admit(list(range(rows)), [config] * rows, [1.0] * rows)
    return made


def layout(rows: int, position: int) -> tuple[torch.Tensor, ...]:
    slots = torch.arange(rows, device="cuda", dtype=torch.int32)
    return slots, torch.zeros_like(slots), torch.full_like(slots, position)


def tracker_steps(scale: Callable[..., Decision], rows: int, count: int) -> list[Step]:
    """One step per position: what an engine calls, token after token."""
    layouts = [layout(rows, position) for position in range(count)]
    return [lambda logits, where=where: scale(logits, *where) for where in layouts]


def policy_steps(rows: int, count: int) -> list[Step]:
    policy = TemperaturePolicy(CONFIG, slots=rows, device="cuda")
    new_step = torch.zeros(rows, dtype=torch.bool, device="cuda")
    return [lambda logits: scale_logits(logits, policy, new_step) for _ in range(count)]


def floor_us(batches: list[torch.Tensor]) -> dict[str, float]:
    """The fastest of FLOOR_TILES."""
    smallest = min(tile for tile, _ in FLOOR_TILES)
    sums = torch.empty(triton.cdiv(batches[0].numel(), smallest), device="cuda")
    found = []
    for tile, warps in FLOOR_TILES:
        steps = [partial(read_twice_write_once, sums=sums, tile=tile, warps=warps)] * len(batches)
        found.append(time_steps(steps, batches))
    return min(found, key=lambda figures: figures["median_us"])


def time_steps(steps: list[Step], batches: list[torch.Tensor]) -> dict[str, float]:
    """Microseconds per step of a graph in which step i works on batch i."""
    pairs = zip(steps, batches, strict=True)
    calls = [lambda _, step=step, logits=logits: step(logits) for step, logits in pairs]
    return graph_us(calls, batches[0])


def host_us(step: Step, logits: torch.Tensor, calls: int = 300) -> float:
    """Microseconds that the host needs to hand over one step; the device is not waited for."""
    for _ in range(20):
        step(logits)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        step(logits)
    elapsed = time.perf_counter() - begin
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def check(rows: int, dtype: torch.dtype) -> None:
    """Both fused paths against torch, with temperatures that do change the logits."""
    config = ReSETConfig(t_low=0.1, t_high=0.7, tau_0=0.5)
    logits = random_logits(rows, dtype)
    logits[:, ::3] = -torch.inf
    logits[: rows // 2] *= 4
    ours, theirs, shared = logits.clone(), logits.clone(), logits.clone()
    decision = new_tracker(rows, "triton", config).scale(ours, *layout(rows, 0))
    wanted = new_tracker(rows, "torch", config).scale(theirs, *layout(rows, 0))
    torch.testing.assert_close(decision.entropy, wanted.entropy, rtol=0, atol=1e-4)
    if not torch.equal(decision.temperature, wanted.temperature) or not torch.equal(ours, theirs):
        raise AssertionError(f"{rows} rows of {dtype}: the tracker disagrees with torch")
    policy = TemperaturePolicy(config, slots=rows, device="cuda")
    scale_logits(shared, policy, torch.zeros(rows, dtype=torch.bool, device="cuda"))
    if not torch.equal(shared, theirs):
        raise AssertionError(f"{rows} rows of {dtype}: scale_logits disagrees with torch")


def measure(rows: int, dtype: torch.dtype) -> None:
    check(rows, dtype)
    size = rows * VOCABULARY * dtype.itemsize
    copies = max(3, math.ceil(ROTATED_BYTES / size))
    batches = [random_logits(rows, dtype) for _ in range(copies)]
    what = {"rows": rows, "vocabulary": VOCABULARY, "dtype": str(dtype).removeprefix("torch.")}
    for cache, used in (("cold", batches), ("warm", batches[:1] * 20)):
        count = len(used)
        floor = floor_us(used)
        speed = 3 * size / 1e6 / floor["median_us"]
        record("sampler", "floor", **what, cache=cache, **floor, tb_per_s=speed)
        for impl, steps in (
            ("tracker", tracker_steps(new_tracker(rows, "triton").scale, rows, count)),
            ("scale_logits", policy_steps(rows, count)),
            ("tracker_torch", tracker_steps(new_tracker(rows, "torch").scale, rows, count)),
        ):
            figures = time_steps(steps, used)
            figures["over_floor"] = figures["median_us"] / floor["median_us"]
            if impl != "tracker_torch":
                figures["host_us"] = host_us(steps[0], used[0])
            record("sampler", impl, **what, cache=cache, **figures)


def sweep() -> None:
    """Median microseconds, cold, for other constants than those of reset._triton_launch."""
    print(f"chosen: tile {TILE}, warps {WARPS}, registers {REGISTERS}")
    choices = list(itertools.product(SWEPT_TILES, (40, 48, 64, 128)))
    for dtype in DTYPES:
        cases = {}
        for rows in (1, 8, 256):
            copies = max(3, math.ceil(ROTATED_BYTES / (rows * VOCABULARY * dtype.itemsize)))
            cases[rows] = [random_logits(rows, dtype) for _ in range(copies)]
        for (tile, warps), registers in choices:
            figures = []
            for rows, batches in cases.items():
                made = new_tracker(rows, "triton")
                kernels = TrackerKernels(
                    made._records,
                    made.detector.table,
                    max_window=made.max_window,
                    max_rows=made.max_rows,
                    tile=tile,
                    warps=warps,
                    registers=registers,
                )
                times = time_steps(tracker_steps(kernels.scale, rows, len(batches)), batches)
                figures.append(f"{rows} rows {times['median_us']:7.2f} us")
            name = str(dtype).removeprefix("torch.")
            chosen = f"{name:9} tile {tile:6} warps {warps:2} registers {registers:3}"
            print(chosen, *figures, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="try other constants; records nothing")
    if parser.parse_args().sweep:
        sweep()
        return
    for rows, dtype in itertools.product(ROWS, DTYPES):
        measure(rows, dtype)


if __name__ == "__main__":
    main()
