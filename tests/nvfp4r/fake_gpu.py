"""GPUs that are not there: tensors that say they are on one, and kernels that record launches."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from cuda.bindings import driver as cuda

from nvfp4r import launches, ops
from nvfp4r.jit import Kernel, target_named
from nvfp4r.plan import DeviceFacts
from tests.nvfp4r.fake_driver import CONTEXT, Driver

H200 = DeviceFacts(132, 232_448, has_pdl=True, has_cluster=True, has_wgmma=True)
_ARGUMENT_BYTES = {"arrange": 40, "quantize": 48, "unpack": 32}  # others: 80


def on_gpu(tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
    """The tensor, on a CPU as before, that says it is on a GPU."""
    of_index = {"is_cuda": True, "device": torch.device("cuda", index)}
    return tensor.as_subclass(type("OnGpu", (torch.Tensor,), of_index))


@contextmanager
def forgotten_launches() -> Iterator[None]:
    """What is kept of modules is forgotten before and after."""
    kept = launches._product_launches, launches._through
    for function in kept:
        function.cache_clear()
    yield
    for function in kept:
        function.cache_clear()


class FakeGpus:
    """What is launched on any of them.

    Attributes:
        launched: (device, CUlaunchConfig, bytes of the argument) in the order of launches.
        kernels: names of the kernels that were looked up.
        late_trigger: of modules that are asked for from now on.
        thread: `stream` (of GPU 0; one more on each next) and `device`, the current ones of each
            thread.
    """

    def __init__(self) -> None:
        self.launched: list[tuple[int, object, bytes]] = []
        self.kernels: list[str] = []
        self.late_trigger = False
        self.thread = threading.local()

    def load_module(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(
            kernel=lambda name: self._kernel(index, name), late_trigger=self.late_trigger
        )

    def _kernel(self, index: int, name: str) -> Kernel:
        self.kernels.append(name)
        recorded = Driver(parameters=(_ARGUMENT_BYTES.get(name.split("_")[0], 80),))
        # Of one kernel on one device; where it is launched has to be its device.
        recorded.launches = SimpleNamespace(
            append=lambda seen: self.launched.append((self._current(index), *seen))
        )
        target = target_named("90a")
        return Kernel(
            recorded, cuda.CUfunction(0x3000), context=CONTEXT, target=target, device_index=index
        )

    def _current(self, index: int) -> int:
        assert self.current_device() == index
        return index

    def current_device(self) -> int:
        return getattr(self.thread, "device", 0)

    def current_stream(self, index: int) -> int:
        time.sleep(0)  # the turn of other threads, once arguments are packed
        return getattr(self.thread, "stream", 0x70) + index

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before = self.current_device()
        self.thread.device = index
        yield
        self.thread.device = before


@contextmanager
def fake_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpus]:
    """H200s, as many as are asked for."""
    gpus = FakeGpus()
    for name in ("current_device", "device"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpus, name))
    # torch without CUDA has none.
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", gpus.current_stream, raising=False)
    monkeypatch.setattr(launches, "load_module", gpus.load_module)
    monkeypatch.setattr(launches, "required_facts", lambda index: H200)
    monkeypatch.setattr(ops, "device_facts", lambda index: H200)
    monkeypatch.setattr(launches, "tuned_plans", lambda index: {})
    with forgotten_launches():
        yield gpus
