"""One loaded kernel, launched through the driver on a stream of torch's.

A launch neither waits nor allocates, so it may be captured into a CUDA graph. Its configuration is
built once and reused: it costs one look-up, one packed argument and one driver call. Knows nothing
of where kernels come from, or what they compute.

What threads share is never changed: configurations, one for each stream. The argument belongs to
the call alone, and may go when it returns: cuLaunchKernelEx copies the parameters from where
`kernelParams` points, and a captured node owns its copies (CUDA Driver API, cuLaunchKernelEx and
cuGraphKernelNodeGetParams).
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from nvfp4r.jit.arch import Target
from nvfp4r.jit.driver import check, current_context, what_to_check

Grid = tuple[int, int, int]
_MAX_THREADS_PER_BLOCK = 1024
_MAX_PORTABLE_CLUSTER = 8
# Arrays of one pointer: to the bytes themselves, to a structure.
_BytesPointer = ctypes.c_char_p * 1
_StructurePointer = ctypes.c_void_p * 1


class Kernel:
    """A `__global__` function with one parameter, a structure passed by value.

    Attributes:
        name: of the function.
        argument_bytes: size of its parameter.
        static_shared_bytes: per block, besides what a launch asks for.
        handle: the driver's CUfunction.
    """

    def __init__(
        self, driver: Any, handle: Any, *, context: Any, target: Target, device_index: int
    ):
        """Reads what the driver knows of a loaded function; its context is current."""
        self._driver = driver
        self._context = context
        self._target = target
        self._device = f"cuda:{device_index}"
        self._lock = threading.Lock()  # of the attributes that `prepare` only ever raises
        # (grid, block, shared bytes, cluster, pdl) -> Launch; as many as a model has shapes.
        self._launches: dict[tuple[Grid, int, int, int, bool], Launch] = {}
        self.handle = handle
        self.name: str = check(driver, driver.cuFuncGetName(handle)).decode()
        self.argument_bytes = self._only_parameter_bytes()
        attribute = driver.CUfunction_attribute
        self.static_shared_bytes = self._attribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        self._dynamic_shared_limit = self._attribute(
            attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        )

    def prepare(self, dynamic_shared_bytes: int, *, carveout_percent: int | None = None) -> None:
        """Allows launches with this much dynamic shared memory; `configured` does so itself.

        Args:
            dynamic_shared_bytes: per block, >= 0.
            carveout_percent: share of the L1 cache to use as shared memory, 0..100; None leaves the
                choice to the driver.

        Raises:
            ValueError: more than the GPU has for a block.
        """
        total = self.static_shared_bytes + dynamic_shared_bytes
        limit = self._target.shared_bytes_per_block
        if dynamic_shared_bytes < 0 or total > limit:
            raise ValueError(
                f"kernel {self.name}: got {dynamic_shared_bytes} dynamic and "
                f"{self.static_shared_bytes} static bytes of shared memory, need 0 or more and at "
                f"most {limit} together on {self._target.sm}; use fewer stages or smaller tiles"
            )
        driver, attribute = self._driver, self._driver.CUfunction_attribute
        with self._lock, current_context(driver, self._context):
            if dynamic_shared_bytes > self._dynamic_shared_limit:
                kind = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check(driver, driver.cuFuncSetAttribute(self.handle, kind, dynamic_shared_bytes))
                self._dynamic_shared_limit = dynamic_shared_bytes
            if carveout_percent is not None:
                kind = attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
                check(driver, driver.cuFuncSetAttribute(self.handle, kind, carveout_percent))

    def configured(
        self, *, grid: Grid, block: int, shared_bytes: int = 0, cluster: int = 1, pdl: bool = False
    ) -> Launch:
        """The kernel with its configuration, to be given an argument and a stream; kept.

        Args:
            grid: blocks in x, y, z; x a multiple of `cluster`.
            block: threads per block, in x.
            shared_bytes: dynamic shared memory per block.
            cluster: blocks per cluster, in x; 1 for none.
            pdl: programmatic dependent launch: the kernel may start before its predecessor on the
                stream ends, and must wait for it by itself (griddepcontrol.wait).

        Raises:
            ValueError: the configuration is one that the GPU cannot have.
        """
        key = (grid, block, shared_bytes, cluster, pdl)
        launch = self._launches.get(key)
        if launch is None:
            self._require_possible(grid, block, cluster, pdl)
            self.prepare(shared_bytes)
            launch = self._launches.setdefault(key, Launch(self, *key))
        return launch

    def blocks_per_sm(self, *, block: int, shared_bytes: int = 0) -> int:
        """How many blocks of this kernel one SM holds at once."""
        self.prepare(shared_bytes)
        with current_context(self._driver, self._context):
            result = self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                self.handle, block, shared_bytes
            )
        return int(check(self._driver, result))

    def max_active_clusters(self, *, block: int, cluster: int, shared_bytes: int = 0) -> int:
        """How many clusters of this kernel the whole GPU holds at once."""
        launch = self.configured(
            grid=(cluster, 1, 1), block=block, shared_bytes=shared_bytes, cluster=cluster
        )
        with current_context(self._driver, self._context):
            result = self._driver.cuOccupancyMaxActiveClusters(
                self.handle, launch.configuration(stream=0)
            )
        return int(check(self._driver, result))

    def _only_parameter_bytes(self) -> int:
        driver = self._driver
        success = driver.CUresult.CUDA_SUCCESS
        (status, _, size), *others = (
            driver.cuFuncGetParamInfo(self.handle, index) for index in range(2)
        )
        if status != success or others[0][0] == success:
            raise ValueError(
                f"kernel {self.name}: need exactly one parameter, a structure that holds them all"
            )
        return int(size)

    def _attribute(self, kind: Any) -> int:
        return int(check(self._driver, self._driver.cuFuncGetAttribute(kind, self.handle)))

    def _require_possible(self, grid: Grid, block: int, cluster: int, pdl: bool) -> None:
        target = self._target
        if len(grid) != 3 or min(grid) < 1:
            fault = f"grid is {grid}, need three sizes of 1 or more"
        elif not 1 <= block <= _MAX_THREADS_PER_BLOCK:
            fault = f"block is {block}, need 1..{_MAX_THREADS_PER_BLOCK} threads"
        elif not 1 <= cluster <= _MAX_PORTABLE_CLUSTER:
            fault = f"cluster is {cluster}, need 1..{_MAX_PORTABLE_CLUSTER} blocks"
        elif cluster > 1 and not target.has_cluster:
            fault = f"cluster is {cluster}, but {target.sm} has no clusters; need 1"
        elif grid[0] % cluster:
            fault = f"grid is {grid}, need a multiple of the cluster, {cluster}, in x"
        elif pdl and not target.has_pdl:
            fault = (
                f"pdl is on, but {target.sm} has no programmatic dependent launch; switch it off"
            )
        else:
            return
        raise ValueError(f"kernel {self.name}: {fault}")


class Launch:
    """A kernel, its grid and all else but what it is given: an argument and a stream.

    Made by `Kernel.configured`. Any thread may call it.
    """

    def __init__(
        self, kernel: Kernel, grid: Grid, block: int, shared_bytes: int, cluster: int, pdl: bool
    ) -> None:
        self._kernel = kernel
        self._key = (grid, block, shared_bytes, cluster, pdl)
        self._handle = kernel.handle
        self._argument_bytes = kernel.argument_bytes
        self._launch_kernel_ex = kernel._driver.cuLaunchKernelEx
        # Stream -> CUlaunchConfig, never changed once it is here.
        self._configurations: dict[int, Any] = {}

    def __call__(self, argument: bytes | ctypes.Structure, stream: int) -> None:
        """Puts the kernel on a stream and returns; does not wait, and does not see its result.

        The caller makes the kernel's device current (`torch.cuda.device`) and keeps every tensor
        that the argument points to alive until torch knows of their use on this stream.

        Args:
            argument: the kernel's parameter: a ctypes structure, or its bytes, such as
                `struct.Struct("@PPif0P").pack` makes them ("0P" pads the end like C does).
            stream: `torch.cuda.current_stream().cuda_stream`.

        Raises:
            ValueError: the argument has another size than the kernel's parameter. Nothing was
                launched.
            RuntimeError: the driver refuses; names the error, the kernel and its configuration.
        """
        configuration = self._configurations.get(stream)
        if configuration is None:
            configuration = self._configurations.setdefault(stream, self.configuration(stream))
        pointer: Any
        if isinstance(argument, bytes):
            pointer, size = _BytesPointer(argument), len(argument)
        else:
            pointer, size = (
                _StructurePointer(ctypes.addressof(argument)),
                ctypes.sizeof(argument),
            )
        if size != self._argument_bytes:
            raise ValueError(
                f"kernel {self._kernel.name}: got an argument of {size} bytes, need "
                f"{self._argument_bytes}; the structure differs from the one in the CUDA source"
            )
        address = ctypes.addressof(pointer)
        (status,) = self._launch_kernel_ex(configuration, self._handle, address, 0)
        if status:
            self._launch_again(status, configuration, address, stream)

    def configuration(self, stream: int) -> Any:
        """A new CUlaunchConfig."""
        grid, block, shared_bytes, cluster, pdl = self._key
        driver = self._kernel._driver
        kinds = driver.CUlaunchAttributeID
        attributes = []
        if cluster > 1:
            value = driver.CUlaunchAttributeValue()
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster, 1, 1
            attributes.append((kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value))
        if pdl:
            value = driver.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            kind = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attributes.append((kind, value))
        configuration = driver.CUlaunchConfig()
        configuration.gridDimX, configuration.gridDimY, configuration.gridDimZ = grid
        configuration.blockDimX = block
        configuration.blockDimY = configuration.blockDimZ = 1
        configuration.sharedMemBytes = shared_bytes
        configuration.hStream = stream
        configuration.attrs = [_attribute(driver, kind, value) for kind, value in attributes]
        configuration.numAttrs = len(attributes)
        return configuration

    def _launch_again(self, status: Any, configuration: Any, address: int, stream: int) -> None:
        """In a thread that has not used CUDA yet no context is current: brings ours along."""
        kernel = self._kernel
        driver = kernel._driver
        if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT and not int(
            check(driver, driver.cuCtxGetCurrent())
        ):
            with current_context(driver, kernel._context):
                (status,) = self._launch_kernel_ex(configuration, self._handle, address, 0)
        if not status:
            return
        grid, block, shared_bytes, cluster, pdl = self._key
        raise RuntimeError(
            f"kernel {kernel.name} was not launched: {status.name} (grid {grid}, block {block}, "
            f"shared bytes {shared_bytes} + {kernel.static_shared_bytes} static, "
            f"cluster {cluster}, pdl {'on' if pdl else 'off'}, stream {stream:#x}, "
            f"{kernel._device}, {kernel._target.sm}); {what_to_check(status.name)}"
        )


def _attribute(driver: Any, kind: Any, value: Any) -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id, attribute.value = kind, value
    return attribute
