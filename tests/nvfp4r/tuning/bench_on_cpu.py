"""`nvfp4r bench` on a machine without a GPU: the ops compute the reference, times are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from nvfp4r import cli_bench, launches
from nvfp4r.launches import Layer
from nvfp4r.ops import linear
from nvfp4r.plan import DeviceFacts, Plan
from nvfp4r.tuning import matrix
from nvfp4r.tuning.bench import Machine

H200 = DeviceFacts(132, 232_448, has_pdl=True, has_cluster=True, has_wgmma=True)
B200 = DeviceFacts(148, 232_448, has_pdl=True, has_cluster=True)
DENSE_US = 5.0


class OnCpu(TorchFunctionMode):
    """What is made on "cuda" is made on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class FakeGpu:
    """Times and results of plans, as a test wants them.

    Attributes:
        facts: of the GPU.
        us: microseconds of a plan; the op's are those of the plan that it would use.
        factor: what a plan's result is multiplied with.
        held_clusters: how many clusters of a kernel the GPU holds.
        copies: how many copies of a matrix each graph ran through.
    """

    def __init__(self, facts: DeviceFacts) -> None:
        self.facts = facts
        self.us: Callable[[Plan], float] = lambda plan: 4.0
        self.factor: Callable[[Plan], float] = lambda plan: 1.0
        self.held_clusters = 1
        self.copies: list[int] = []
        self._last_us = DENSE_US

    def run_plan(self, plan: Plan, x: torch.Tensor, layer: Layer, out=None) -> torch.Tensor:
        self._last_us = self.us(plan)
        y = linear(x, *layer) * self.factor(plan)
        return y if out is None else out.copy_(y)

    def op(self, x: torch.Tensor, *stored) -> torch.Tensor:
        layer = Layer(*stored)
        sizes, quantised = (x.shape[0], layer.N, layer.K), layer.input_scale is not None
        return self.run_plan(
            launches.plan_for(*sizes, layer.order, self.facts, 0, quantised), x, layer
        ).to(x.dtype)

    def graph_us(self, calls, x, repeats=11) -> dict[str, float]:
        self._last_us = DENSE_US  # a dense product leaves it
        calls[0](x)
        self.copies.append(len(calls))
        us = self._last_us
        return {"median_us": us, "p10_us": 0.9 * us, "p90_us": 1.1 * us}

    def kernel(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(max_active_clusters=lambda **configuration: self.held_clusters)


@contextmanager
def replacing_gpu(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    name: str = "NVIDIA H200",
    facts: DeviceFacts = H200,
) -> Iterator[FakeGpu]:
    """Kernels, timers and facts of a GPU that keeps its tuned plans in `folder`."""
    gpu = FakeGpu(facts)
    machine = Machine(0, name, "580.95.05", facts, read_tb_per_s=4.0, rotated_bytes=500_000)
    monkeypatch.setenv("NVFP4R_CACHE_DIR", str(folder))
    monkeypatch.delenv("NVFP4R_TUNED_PLANS", raising=False)
    monkeypatch.setattr(cli_bench, "require_machine", lambda: machine)
    monkeypatch.setattr(matrix, "run_plan", gpu.run_plan)
    monkeypatch.setattr(matrix, "linear", gpu.op)
    monkeypatch.setattr(matrix, "graph_us", gpu.graph_us)
    monkeypatch.setattr(matrix, "load_module", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    monkeypatch.setattr(launches, "required_facts", lambda index: facts)
    launches.tuned_plans.cache_clear()
    with OnCpu():
        yield gpu
    launches.tuned_plans.cache_clear()
