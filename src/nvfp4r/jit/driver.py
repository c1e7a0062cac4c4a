"""The CUDA driver through `cuda.bindings`: imported when it is used, errors as exceptions.

Keeps to what versions 12.9 to 13 of the bindings have in common.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LIMITS = "check grid, block, cluster and shared memory against the limits of this GPU"
_RESOURCES = (
    "a block needs more registers or shared memory than an SM has; use fewer threads or less "
    "shared memory"
)
_CLUSTER = (
    "no group of SMs of this GPU holds a cluster of such blocks; use a smaller cluster or less "
    "shared memory"
)
_OTHER_CONTEXT = (
    "make the kernel's device current (torch.cuda.device) and take the stream from that device"
)
_RESET = "the device was reset under the kernels; start a new process"
_EARLIER_FAULT = (
    "an earlier kernel of this process failed; find it with CUDA_LAUNCH_BLOCKING=1 or "
    "compute-sanitizer"
)
_MEMORY = "free some memory on the GPU; torch's cache may hold it all"
_OTHER_GPU = "the code is built for another GPU"
_NEWER = (
    "the code is damaged, or newer than this driver knows; install a newer driver, or the "
    "nvidia-cuda-nvrtc of the driver's CUDA version"
)
_CAPTURE = "the stream is being captured in a way that forbids this; capture on a side stream"
_WHAT_TO_CHECK = {
    "CUDA_ERROR_INVALID_VALUE": _LIMITS,
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": _RESOURCES,
    "CUDA_ERROR_INVALID_CLUSTER_SIZE": _CLUSTER,
    "CUDA_ERROR_INVALID_CONTEXT": _OTHER_CONTEXT,
    "CUDA_ERROR_INVALID_HANDLE": _OTHER_CONTEXT,
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": _RESET,
    "CUDA_ERROR_ILLEGAL_ADDRESS": _EARLIER_FAULT,
    "CUDA_ERROR_MISALIGNED_ADDRESS": _EARLIER_FAULT,
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": _EARLIER_FAULT,
    "CUDA_ERROR_LAUNCH_FAILED": _EARLIER_FAULT,
    "CUDA_ERROR_LAUNCH_TIMEOUT": _EARLIER_FAULT,
    "CUDA_ERROR_OUT_OF_MEMORY": _MEMORY,
    "CUDA_ERROR_NO_BINARY_FOR_GPU": _OTHER_GPU,
    "CUDA_ERROR_INVALID_SOURCE": _OTHER_GPU,
    "CUDA_ERROR_INVALID_IMAGE": _NEWER,
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": _NEWER,
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": _CAPTURE,
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": _CAPTURE,
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": _CAPTURE,
}


def cuda_driver() -> Any:
    """The module `cuda.bindings.driver`, with the driver initialised.

    Raises:
        ImportError: the bindings or the driver are missing.
    """
    try:
        from cuda.bindings import driver

        # The library is loaded by the first call; that it is missing is a RuntimeError.
        result = driver.cuInit(0)
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"the CUDA kernels are launched through cuda-bindings, which does not work here "
            f"({error}); run: pip install 'reset-decoding[gpu]' (cuda-bindings >= 12.9, < 14), and "
            "check the driver with nvidia-smi"
        ) from error
    check(driver, result)
    return driver


def check(driver: Any, result: tuple[Any, ...]) -> Any:
    """What a driver call returned, without its status.

    Raises:
        RuntimeError: the status is an error; names it.
    """
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the CUDA driver failed: {status.name}; {what_to_check(status.name)}")
    return values[0] if values else None


@contextmanager
def current_context(driver: Any, context: Any) -> Iterator[None]:
    """Makes a context current in this thread for a while."""
    check(driver, driver.cuCtxPushCurrent(context))
    try:
        yield
    finally:
        check(driver, driver.cuCtxPopCurrent())


def what_to_check(error_name: str) -> str:
    """Advice for an error of the driver, by its name."""
    return _WHAT_TO_CHECK.get(error_name, "see CUresult in the CUDA driver documentation")
