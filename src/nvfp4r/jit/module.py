"""The kernels of this package on a device: loaded into torch's context, once.

Everything that may allocate or wait happens here, so that launches can be captured into CUDA
graphs. A process keeps one module per device; there is nothing to unload.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import torch

from nvfp4r.jit.arch import Target, target_for
from nvfp4r.jit.cache import cubin_for
from nvfp4r.jit.driver import check, cuda_driver, current_context, what_to_check
from nvfp4r.jit.launch import Kernel

LATE_TRIGGER = "-DNVFP4R_LATE_TRIGGER=1"
"""Compiler option: the kernel that follows starts once ours has waited for the one before it
(kernels/ptx.cuh). Between kernels of our own it costs 0 to 4 %, a few of them 10 to 23 % at 1 or 2
tokens (docs/log.md)."""


class Module:
    """All kernels of one cubin on one device, loaded.

    Attributes:
        device_index: of torch.
        target: what they were compiled for.
        names: of the kernels.
        late_trigger: compiled with LATE_TRIGGER, so that kernels around ours may start early.
    """

    def __init__(
        self,
        device_index: int,
        target: Target,
        kernels: dict[str, Kernel],
        late_trigger: bool = False,
    ) -> None:
        self.device_index = device_index
        self.target = target
        self.late_trigger = late_trigger
        self.names = tuple(sorted(kernels))
        self._kernels = kernels

    def kernel(self, name: str) -> Kernel:
        """Raises ValueError if there is none of this name."""
        try:
            return self._kernels[name]
        except KeyError:
            raise ValueError(
                f"kernel: got {name!r}, need one of {', '.join(self.names)} ({self.target.sm})"
            ) from None


class ModuleStore:
    """One module per device, loaded when it is first asked for, by one thread."""

    def __init__(self, load: Callable[[int], Module]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._modules: dict[int, Module] = {}

    def get(self, device_index: int) -> Module:
        module = self._modules.get(device_index)
        if module is None:
            with self._lock:
                module = self._modules.get(device_index)
                if module is None:
                    module = self._modules[device_index] = self._load(device_index)
        return module


def load_cubin(
    device_index: int, cubin: bytes, target: Target, late_trigger: bool = False
) -> Module:
    """Loads machine code into torch's context of a device, every kernel at once.

    Args:
        device_index: of torch.
        cubin: an ELF image, as `compile_cubin` makes it.
        target: what it was compiled for.
        late_trigger: whether that was with LATE_TRIGGER.

    Raises:
        ImportError: the Python bindings of the CUDA driver are missing.
        RuntimeError: the driver refuses it: made for another GPU, or newer than the driver; or the
            stream is being captured, when nothing may be loaded.
    """
    torch.cuda.init()
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the CUDA kernels are not loaded on cuda:{device_index} yet, and the current stream "
            "is being captured; call nvfp4r.jit.load_module(device_index) before the capture"
        )
    driver = cuda_driver()
    device = check(driver, driver.cuDeviceGet(device_index))
    context = check(driver, driver.cuDevicePrimaryCtxRetain(device))  # the one that torch uses
    with current_context(driver, context):
        status, module = driver.cuModuleLoadData(cubin)
        if status:
            version = check(driver, driver.cuDriverGetVersion())
            raise RuntimeError(
                f"the kernels for {target.sm} were not loaded on cuda:{device_index} "
                f"({torch.cuda.get_device_name(device_index)}): {status.name}; "
                f"{what_to_check(status.name)} (the driver is one for CUDA "
                f"{version // 1000}.{version % 1000 // 10})"
            )
        count = check(driver, driver.cuModuleGetFunctionCount(module))
        kernels = {}
        for handle in check(driver, driver.cuModuleEnumerateFunctions(count, module)):
            check(driver, driver.cuFuncLoad(handle))  # lazy loading could fall into a capture
            kernel = Kernel(
                driver, handle, context=context, target=target, device_index=device_index
            )
            kernels[kernel.name] = kernel
    return Module(device_index, target, kernels, late_trigger)


def load_module(device_index: int) -> Module:
    """The kernels of this package on a device; compiled and loaded by the first call.

    Any thread may call it, and each device has one module for the life of the process. Call it
    once before capturing a CUDA graph: the first call takes seconds if nothing is cached.

    Args:
        device_index: of torch.

    Raises:
        UnsupportedGPUError: the kernels are not built for this GPU.
        CompileError, ImportError, FileNotFoundError: as `nvfp4r.jit.cubin_for`.
        RuntimeError: as `load_cubin`.
    """
    return _MODULES.get(device_index)


def inductor_starts_early() -> bool:
    """Whether kernels that torch.compile makes may start before the one before them has ended.

    That is `triton.enable_pdl` of Inductor's configuration, or TORCHINDUCTOR_ENABLE_PDL=1 where
    nothing has imported that yet. Such a kernel reads what the kernel just before it has not
    written without a wait.
    """
    config = sys.modules.get("torch._inductor.config")
    if config is None:
        return os.environ.get("TORCHINDUCTOR_ENABLE_PDL") == "1"
    return bool(getattr(config.triton, "enable_pdl", False))  # older versions have none


def _load_package_kernels(device_index: int) -> Module:
    target = target_for(torch.cuda.get_device_capability(device_index))
    late = inductor_starts_early()
    cubin = cubin_for(target, (LATE_TRIGGER,) if late else ())
    return load_cubin(device_index, cubin, target, late)


# State of the process, like the driver's own: a loaded module belongs to the device's context.
_MODULES = ModuleStore(_load_package_kernels)
