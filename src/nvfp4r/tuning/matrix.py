"""Copies of one random matrix on a GPU: results of packed products with it, and their times.

Weights and activations are random, as times do not depend on them. timing.py says how times are
taken; what is measured, and what follows from it, is bench.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4r.format import BLOCK, NVFP4Tensor, row_chunks
from nvfp4r.jit import load_module
from nvfp4r.launches import Layer, run_plan
from nvfp4r.ops import linear
from nvfp4r.packed import ORDERS, Order, pack
from nvfp4r.plan import Plan
from nvfp4r.quantize import quantize_activations
from nvfp4r.tuning.shapes import Shape
from nvfp4r.tuning.timing import Call, copies_of, graph_us

_MOST_COPIES = 4096  # a graph of more launches takes long to make
_INPUT_SCALE = 6 / 2688  # of activations up to 6 in magnitude: more than a normal number ever is


@dataclass(frozen=True)
class Product:
    """What is measured of each shape: the dtype of the activations, and whether x is quantised."""

    dtype: torch.dtype
    quantised: bool = False

    @property
    def order(self) -> Order:
        return ORDERS[self.dtype]

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        activations = "nvfp4" if self.quantised else "none"
        return {"dtype": str(self.dtype).removeprefix("torch."), "activations": activations}


@dataclass(frozen=True)
class Truth:
    """A product in float64 and how far off a kernel's may be, both [M, N]."""

    y: Tensor
    limit: Tensor

    def excess(self, y: Tensor) -> float:
        """Largest error in units of what is allowed, so right is at most 1; NaN if y holds one."""
        return float(((y.double() - self.y).abs() / self.limit).max())


def truth_of(
    x: Tensor, weight: NVFP4Tensor, input_scale: Tensor | None, dtype: torch.dtype | None = None
) -> Truth:
    """`x @ weight.T` in float64, on the device of both.

    The limit: a float32 sum of K exact products is off by K 2**-23 of the sum of their magnitudes
    at most, as tensor cores cut bits off; scales cost 2**-24 each, four times at most; the last
    cast half a unit in its last place, or half the smallest number. 1.01 covers the terms of second
    order.

    Args:
        x: [M, K] floating.
        weight: N outputs, K inputs, with one global scale.
        input_scale: float32 []; given, x is quantised to NVFP4 first.
        dtype: of the result; x's by default.
    """
    values, scale = x.double(), weight.global_scale.double()
    if input_scale is not None:
        values, scale = quantize_activations(x, input_scale)[0].double(), scale * input_scale
    N, K = weight.shape
    one = torch.ones((), device=x.device)  # so that dequantising to float32 is exact
    y = torch.empty(x.shape[0], N, dtype=torch.float64, device=x.device)
    magnitude = torch.empty_like(y)
    for rows in row_chunks(N, K, x.device):
        part = NVFP4Tensor(weight.codes[rows], weight.block_scale[rows], one)
        matrix = part.dequantize(torch.float32).double()
        y[:, rows] = values @ matrix.T * scale
        magnitude[:, rows] = values.abs() @ matrix.abs().T * scale
    rounding = torch.finfo(dtype or x.dtype)
    sums = (K * 2**-23 + 4 * 2**-24) * magnitude
    smallest = rounding.smallest_normal * rounding.eps
    return Truth(y, 1.01 * (sums + rounding.eps / 2 * y.abs()) + smallest / 2)


def random_weight(N: int, K: int, device: str = "cuda") -> NVFP4Tensor:
    """A matrix of every code, with block scales from 2**-2 to 2**3 and a global one of 1e-3."""
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device=device)
    scales = torch.randint(40, 81, (N, K // BLOCK), dtype=torch.uint8, device=device)
    scale = torch.tensor(1e-3, device=device)
    return NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), scale)


class Matrix:
    """So many copies of a matrix that none comes from the L2 cache when it is read again.

    Args:
        shape: of the matrix.
        product: what is computed with it.
        rotated: bytes that the copies take at least (`timing.rotated_bytes`).

    Attributes:
        shape: of the matrix.
        nbytes: of one copy as it is packed, without padding.

    Raises:
        ValueError: the shape is too small for that.
    """

    def __init__(self, shape: Shape, product: Product, rotated: int) -> None:
        self.shape = shape
        self.nbytes = shape.N * (shape.K // 2 + shape.K // BLOCK)
        count = copies_of(self.nbytes, rotated)
        if count > _MOST_COPIES:
            raise ValueError(
                f"shape {shape}: {_MOST_COPIES} copies of {self.nbytes} bytes are less than the "
                f"{rotated} that keep them out of the L2 cache; measure a larger shape"
            )
        self._dtype, self._rotated = product.dtype, rotated
        self._weight = random_weight(shape.N, shape.K)
        packed = pack(self._weight, product.order, name=f"shape {shape}")
        scale = torch.tensor(_INPUT_SCALE, device="cuda") if product.quantised else None
        self._layers = [
            Layer(packed.tiles.clone(), packed.alpha, None, scale, packed.N, packed.K, packed.order)
            for _ in range(count)
        ]
        self._examples: dict[int, tuple[Tensor, Truth]] = {}

    def op_excess(self, M: int) -> float:
        """`Truth.excess` of the op for M tokens."""
        x, truth = self._example(M)
        return truth.excess(linear(x, *self._layers[0]))

    def op_us(self, M: int) -> dict[str, float]:
        """`graph_us` of the op for M tokens."""
        return graph_us([_by_op(layer) for layer in self._layers], self._example(M)[0])

    def can_run(self, plan: Plan) -> bool:
        """Whether the GPU holds one of the plan's clusters at all."""
        if plan.cluster == 1:
            return True
        kernel = load_module(self._weight.device.index).kernel(plan.kernel)
        held = kernel.max_active_clusters(
            block=plan.threads, cluster=plan.cluster, shared_bytes=plan.shared_bytes
        )
        return held > 0

    def plan_excess(self, plan: Plan, M: int) -> float:
        """`Truth.excess` of a plan for M tokens; NaN where it writes nothing."""
        x, truth = self._example(M)
        y = torch.full((M, self.shape.N), float("nan"), dtype=x.dtype, device=x.device)
        return truth.excess(run_plan(plan, x, self._layers[0], out=y))

    def plan_us(self, plan: Plan, M: int, repeats: int) -> float:
        """Median microseconds of a plan for M tokens."""
        calls = [_by_plan(plan, layer) for layer in self._layers]
        return graph_us(calls, self._example(M)[0], repeats)["median_us"]

    def dense_us(self, tokens: Sequence[int]) -> list[float]:
        """Median microseconds of cuBLAS with 16-bit weights for each M; they go away afterwards."""
        N, K = self.shape.N, self.shape.K
        weights = [
            torch.randn(N, K, dtype=self._dtype, device="cuda")
            for _ in range(copies_of(2 * N * K, self._rotated))
        ]
        calls = [_by_dense(weight) for weight in weights]
        return [graph_us(calls, self._example(M)[0])["median_us"] for M in tokens]

    def _example(self, M: int) -> tuple[Tensor, Truth]:
        """x [M, K] and what it has to give."""
        if M not in self._examples:
            x = torch.randn(M, self.shape.K, device="cuda").to(self._dtype)
            truth = truth_of(x, self._weight, self._layers[0].input_scale)
            self._examples[M] = x, truth
        return self._examples[M]


def _by_op(layer: Layer) -> Call:
    return lambda x: linear(x, *layer)


def _by_plan(plan: Plan, layer: Layer) -> Call:
    return lambda x: run_plan(plan, x, layer)


def _by_dense(weight: Tensor) -> Call:
    return lambda x: F.linear(x, weight)
