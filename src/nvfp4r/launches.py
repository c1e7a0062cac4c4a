"""Calls of the CUDA kernels: arguments as the sources declare them, outputs, grids.

Nothing is checked here: ops.py has looked at every tensor before. Knows the argument structures of
kernels/*.cuh; which kernel computes a product is the choice of plan/, by its rule or by what was
measured on this GPU (plan/tuned.py).

Where no CUDA graph replays the calls, the time that a call takes on the host counts. So whatever
depends on sizes alone is found once (`_product_launches`), and a call adds addresses.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4r.format import BLOCK
from nvfp4r.jit import Launch, UnsupportedGPUError, load_module, target_for
from nvfp4r.packed import ORDERS
from nvfp4r.plan import (
    TILE_COLUMNS,
    TILE_ROWS,
    DeviceFacts,
    Plan,
    choose_plan,
    even_shared_bytes,
    in_passes,
    passes_for,
    plan_with,
    token_range,
)
from nvfp4r.plan.large import LargeSplit
from nvfp4r.plan.medium import MAX_KERNEL_M, MAX_MEDIUM_M
from nvfp4r.plan.tuned import Problem, Tuned, TunedPlans, load_tuned

_LINEAR = struct.Struct("@6P8i0P")  # struct LinearArgs of kernels/linear_args.cuh
_LARGE = struct.Struct("@6P8i0P")  # struct LargeArgs of kernels/large_work.cuh
_ARRANGE = struct.Struct("@3P3i0P")  # struct ArrangeArgs of kernels/arrange.cuh
_QUANTIZE = struct.Struct("@4PQi0P")  # struct QuantizeArgs of kernels/quantize.cuh
_UNPACK = struct.Struct("@2P4i")  # struct UnpackArgs of kernels/unpack.cuh
_ROTATE, _QUANTIZE_X = 1, 2  # bits of `prologue` in both; kernels/quantize.cuh
_THREADS = 256  # of the two that go through memory once
_CTAS_PER_SM = 8
_UNPACKED_ELEMENTS = 1 << 25  # of a chunk: 64 MiB, enough to keep a dense product efficient


class Layer(NamedTuple):
    """What the ops take beside x, as a schema can carry it: a `PackedWeight` and its companions.

    Attributes:
        tiles, alpha, N, K, order: of a `PackedWeight`.
        bias: [N] in x's dtype, or None.
        input_scale: float32 []; given, x is quantised to NVFP4 first (W4A4).
        rotation: of x before all else, or None.
    """

    tiles: Tensor
    alpha: Tensor
    bias: Tensor | None
    input_scale: Tensor | None
    N: int
    K: int
    order: str
    rotation: str | None = None

    @property
    def prepares(self) -> bool:
        """Whether anything is done to x before it is multiplied."""
        return self.input_scale is not None or self.rotation is not None


def device_facts(index: int) -> DeviceFacts | None:
    """Of a GPU that the kernels are built for, else None."""
    try:
        return required_facts(index)
    except UnsupportedGPUError:
        return None


@cache
def required_facts(index: int) -> DeviceFacts:
    """Of a GPU.

    Raises:
        UnsupportedGPUError: the kernels are not built for it.
    """
    target = target_for(torch.cuda.get_device_capability(index))
    return DeviceFacts(
        sm_count=torch.cuda.get_device_properties(index).multi_processor_count,
        shared_bytes_per_block=target.shared_bytes_per_block,
        has_pdl=target.has_pdl,
        has_cluster=target.has_cluster,
        has_wgmma=target.has_wgmma,
    )


def plan_for(
    M: int,
    N: int,
    K: int,
    order: str,
    facts: DeviceFacts,
    device_index: int,
    quantised: bool = False,
) -> Plan:
    """The plan that the ops use: as tuned on this GPU, else by the rule of `choose_plan`.

    Args:
        facts: of the GPU with this index.
        M, N, K, order, quantised: as for `choose_plan`.

    Raises:
        ValueError: as `choose_plan`, or as `load_tuned`.
    """
    passes = passes_for(M, facts.has_wgmma)
    if passes > 1 and M <= MAX_KERNEL_M:
        part = plan_for(-(-M // passes), N, K, order, facts, device_index, quantised)
        return in_passes(part, passes)
    if M <= MAX_MEDIUM_M:
        tuned = tuned_plans(device_index)
        found = tuned and tuned.get(Problem(token_range(M), N, K, order, quantised))
        if found:
            return _tuned_plan(found, M, N, K, order, facts, quantised)
    return choose_plan(M, N, K, order, facts, quantised)


@lru_cache(maxsize=1 << 14)  # every layer asks again, as `choose_plan`
def _tuned_plan(
    tuned: Tuned, M: int, N: int, K: int, order: str, facts: DeviceFacts, quantised: bool
) -> Plan:
    return plan_with(tuned.split, M, N, K, order, facts, quantised, reason=tuned.reason)


@cache
def tuned_plans(device_index: int) -> TunedPlans:
    """Those of a GPU, read once in a process; `tuned_plans.cache_clear` makes it read again."""
    return load_tuned(torch.cuda.get_device_name(device_index), required_facts(device_index))


def run_plan(
    plan: Plan,
    x: Tensor,
    layer: Layer,
    out: Tensor | None = None,
    *,
    prepared: bool = False,
) -> Tensor:
    """Launch the kernel of a plan; for the ops, and for measurements that compare plans.

    Args:
        x: [M, K]; the plan was made for this M, and with `quantised` if x has to be prepared
            (`Layer.prepares`).
        out: [M, N], contiguous, in x's dtype, its start a multiple of 16 bytes where N is one of 4;
            a new one by default.
        prepared: x went through `run_prologue`, so that nothing is left to do but the input scale.
    """
    prologue = 0 if prepared else _prologue(layer.input_scale, layer.rotation)
    x = _aligned(x)
    if prologue and plan.apart:
        facts = required_facts(x.device.index)
        x, prologue = run_prologue(x, layer.input_scale, facts, rotation=layer.rotation), 0
    M = x.shape[0]
    y = x.new_empty((M, layer.N)) if out is None else out
    run = _run_large if isinstance(plan.split, LargeSplit) else _run_once
    if plan.passes == 1:
        run(plan, x, layer, y, prologue)
        return y
    step = -(-M // plan.passes)
    for first in range(0, M, step):
        rows = slice(first, first + step)
        run(plan, x[rows], layer, y[rows], prologue)
    return y


class _ProductLaunches(NamedTuple):
    """What all calls have in common that run a plan for so many tokens of such a matrix.

    Attributes:
        product: the plan's kernel.
        sizes: the end of its argument, from M on.
        arrange: the kernel before it that arranges x, of linear_large alone.
        arranged: shape of what that makes.
    """

    product: Launch
    sizes: tuple[int, ...]
    arrange: Launch | None = None
    arranged: tuple[int, ...] = ()


@lru_cache(maxsize=1 << 14)  # as many as choose_plan keeps
def _product_launches(
    plan: Plan, M: int, N: int, K: int, order: str, device_index: int, prologue: int
) -> _ProductLaunches:
    """For x [M, K] on a GPU; `prologue` is what the plan's own kernels do to it."""
    module, facts = load_module(device_index), required_facts(device_index)
    early = plan.pdl and module.late_trigger  # kernels of others may let ours start
    product = module.kernel(plan.kernel).configured(
        grid=(plan.grid, 1, 1),
        block=plan.threads,
        shared_bytes=even_shared_bytes(plan, facts) if early else plan.shared_bytes,
        cluster=plan.cluster,
        pdl=plan.pdl,
    )
    tiles, kblocks = -(-N // TILE_ROWS), -(-K // TILE_COLUMNS)
    sizes = (M, N, K, tiles, kblocks, plan.depth, plan.x_depth)
    if not isinstance(plan.split, LargeSplit):
        return _ProductLaunches(product, (*sizes, prologue))
    stages, groups = -(-K // 64), -(-M // 8)
    threads = stages * groups * 32
    arrange = _through("arrange", order, threads, facts, device_index)
    return _ProductLaunches(product, (*sizes, plan.split.row_units), arrange, (stages, groups, 512))


def _run_once(plan: Plan, x: Tensor, layer: Layer, y: Tensor, prologue: int) -> None:
    """One launch, for at most as many rows as the plan's kernel takes."""
    index = x.device.index
    shared = _product_launches(plan, x.shape[0], layer.N, layer.K, layer.order, index, prologue)
    argument = _LINEAR.pack(*_addresses(x, layer, y), *shared.sizes)
    _put(index, (shared.product, argument))


def _run_large(plan: Plan, x: Tensor, layer: Layer, y: Tensor, prologue: int) -> None:
    """Two launches: x into the order of kernels/arrange.cuh, prepared on the way; the product."""
    M, K, index = x.shape[0], layer.K, x.device.index
    shared = _product_launches(plan, M, layer.N, K, layer.order, index, prologue)
    assert shared.arrange is not None
    arranged = x.new_empty(shared.arranged)
    addresses = _addresses(arranged, layer, y)
    arrange = _ARRANGE.pack(x.data_ptr(), addresses[1], addresses[5], M, K, prologue)
    product = _LARGE.pack(*addresses, *shared.sizes)
    _put(index, (shared.arrange, arrange), (shared.product, product))


def _addresses(x: Tensor, layer: Layer, y: Tensor) -> tuple[int, int, int, int, int, int]:
    """The start of LinearArgs and LargeArgs."""
    return (
        layer.tiles.data_ptr(),
        x.data_ptr(),
        y.data_ptr(),
        layer.alpha.data_ptr(),
        0 if layer.bias is None else layer.bias.data_ptr(),
        0 if layer.input_scale is None else layer.input_scale.data_ptr(),
    )


def _put(device_index: int, *launches: tuple[Launch, bytes]) -> None:
    """Kernels with their arguments on the current stream of a GPU, one after the other."""
    if torch.cuda.current_device() != device_index:
        with torch.cuda.device(device_index):
            _put(device_index, *launches)
        return
    # torch.cuda.current_stream(device_index).cuda_stream, without an object for the stream; what
    # torch.compile writes into its own code.
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    for launch, argument in launches:
        launch(argument, stream)


def run_prologue(
    x: Tensor,
    input_scale: Tensor | None,
    facts: DeviceFacts,
    *,
    rotation: str | None = None,
    saturated: Tensor | None = None,
) -> Tensor:
    """16-bit activations rotated, rounded to NVFP4 under a scale, or both, in one pass.

    Args:
        x: [..., K].
        input_scale: float32 [], or None for no rounding.
        rotation: "hadamard16" or None.
        saturated: int64 [], to which the number of blocks that saturated is added.

    Returns:
        x's shape and dtype, without `input_scale`.
    """
    x = _aligned(x)
    values = torch.empty_like(x)
    blocks = x.numel() // BLOCK
    if blocks:
        argument = _QUANTIZE.pack(
            x.data_ptr(),
            values.data_ptr(),
            0 if saturated is None else saturated.data_ptr(),
            0 if input_scale is None else input_scale.data_ptr(),
            blocks,
            _prologue(input_scale, rotation),
        )
        index = x.device.index
        _put(index, (_through("quantize", ORDERS[x.dtype], blocks, facts, index), argument))
    return values


def _prologue(input_scale: Tensor | None, rotation: str | None) -> int:
    return (0 if rotation is None else _ROTATE) | (0 if input_scale is None else _QUANTIZE_X)


def unpacked_rows(layer: Layer, M: int, facts: DeviceFacts) -> Iterator[tuple[Tensor, slice]]:
    """The exact `e2m1 * e4m3` of some rows at a time, [rows, K] in the dtype of `order`.

    A chunk is overwritten by the next. Chunks are smaller for large M, whose product with a chunk
    takes memory too.
    """
    dtype = next(dtype for dtype, order in ORDERS.items() if order == layer.order)
    tile_count, kblocks, _ = layer.tiles.shape
    step = max(1, _UNPACKED_ELEMENTS // (max(layer.K, M) * TILE_ROWS))
    rows_at_once = min(layer.N, step * TILE_ROWS)
    matrix = torch.empty((rows_at_once, layer.K), dtype=dtype, device=layer.tiles.device)
    for tile in range(0, tile_count, step):
        tiles = min(step, tile_count - tile)
        rows = slice(tile * TILE_ROWS, min(layer.N, (tile + tiles) * TILE_ROWS))
        count = rows.stop - rows.start
        argument = _UNPACK.pack(
            layer.tiles[tile].data_ptr(), matrix.data_ptr(), count, layer.K, tiles, kblocks
        )
        index, threads = matrix.device.index, tiles * kblocks * 32
        _put(index, (_through("unpack", layer.order, threads, facts, index), argument))
        yield matrix[:count], rows


@lru_cache(maxsize=1 << 14)
def _through(name: str, order: str, threads: int, facts: DeviceFacts, device_index: int) -> Launch:
    """`<name>_<order>` with so many threads, or as many as the GPU holds in a loop."""
    grid = min(-(-threads // _THREADS), _CTAS_PER_SM * facts.sm_count)
    kernel = load_module(device_index).kernel(f"{name}_{order}")
    return kernel.configured(grid=(grid, 1, 1), block=_THREADS, pdl=facts.has_pdl)


def _aligned(x: Tensor) -> Tensor:
    """Contiguous, and at a multiple of 16 bytes, as the loads need it; torch allocates aligned."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
