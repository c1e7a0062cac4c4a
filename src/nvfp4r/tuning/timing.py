"""Times of short GPU kernels, with weights that come from memory and not from the L2 cache.

A CUDA graph runs one call after the other, as a decoding step does: no launch overhead of the host
is in it, and a kernel's prologue may overlap the kernel before. Every call reads another copy of
the weights, so much in all that none is left in L2 when its turn comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Call = Callable[[Tensor], Tensor]

_LEAST_ROTATED_BYTES = 256_000_000
_FEWEST_COPIES = 3
_READ_FLOATS = 1 << 29  # 2 GiB
_REPLAYS = 3  # between two events
_WARMING_SUMS = 256  # a GPU at rest takes some 100 ms to raise its clocks


def rotated_bytes(device_index: int) -> int:
    """How much the copies of a matrix must take at least: more than twice the L2 cache."""
    l2_bytes = torch.cuda.get_device_properties(device_index).L2_cache_size
    return max(_LEAST_ROTATED_BYTES, 2 * l2_bytes + 1)


def copies_of(stored_bytes: int, rotated: int) -> int:
    """How many copies of a matrix make up `rotated` bytes, or a little more."""
    return max(_FEWEST_COPIES, -(-rotated // stored_bytes))


def graph_us(calls: Sequence[Call], x: Tensor, repeats: int = 11) -> dict[str, float]:
    """Microseconds per call of a graph that runs every call once on `x`.

    Args:
        calls: what to time; the first is also called before the capture.
        x: their argument, on the current GPU.
        repeats: measurements; each is of three replays.

    Returns:
        "median_us", and the 10th and 90th percentile "p10_us", "p90_us".
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0](x)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call(x)
    for _ in range(_REPLAYS):
        graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / _REPLAYS / len(calls))
    times.sort()
    return {
        "median_us": times[repeats // 2],
        "p10_us": times[repeats // 10],
        "p90_us": times[-1 - repeats // 10],
    }


def read_bandwidth() -> float:
    """TB/s of summing 2 GiB on the current GPU, or a quarter of its memory if that is less."""
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    data = torch.randn(min(_READ_FLOATS, memory // 16), device="cuda")
    for _ in range(_WARMING_SUMS):
        data.sum()
    return data.nbytes / graph_us([lambda _: data.sum()], data)["median_us"] / 1e6
