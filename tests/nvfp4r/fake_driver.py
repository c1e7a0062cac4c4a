"""The CUDA driver of a machine without a GPU: records what it is asked, agrees to everything."""
# ruff: noqa: N802  (the functions have the driver's names)

import ctypes

from cuda.bindings import driver as cuda

OK = cuda.CUresult.CUDA_SUCCESS
BAD = cuda.CUresult.CUDA_ERROR_INVALID_VALUE
CONTEXT = cuda.CUcontext(0x1000)
DYNAMIC = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
STATIC_BYTES = 16  # of every kernel


class Driver:
    """Functions are recorded; structures and error codes are the real ones.

    Args:
        parameters: sizes of each kernel's parameters.
        statuses: what the next launches, or loads of a module, return.
        current: the context that is current in this thread, 0 for none.
    """

    def __init__(self, *, parameters=(24,), statuses=(), current=1):
        self.launches = []  # (CUlaunchConfig, bytes of the argument)
        self.prepared = []  # (attribute, value)
        self.calls = []
        self.parameters = parameters
        self.statuses = list(statuses)
        self.contexts = [current]

    def __getattr__(self, name):
        return getattr(cuda, name)

    def cuInit(self, flags):
        return (OK,)

    def cuDriverGetVersion(self):
        return OK, 12080

    def cuDeviceGet(self, index):
        return OK, index

    def cuDevicePrimaryCtxRetain(self, device):
        return OK, CONTEXT

    def cuCtxPushCurrent(self, context):
        self.contexts.append(int(context))
        return (OK,)

    def cuCtxPopCurrent(self):
        return OK, self.contexts.pop()

    def cuCtxGetCurrent(self):
        return OK, self.contexts[-1]

    def cuModuleLoadData(self, image):
        self.calls.append(("load", image, self.contexts[-1]))
        return (self.statuses.pop(0), None) if self.statuses else (OK, 0x2000)

    def cuModuleGetFunctionCount(self, module):
        return OK, 2

    def cuModuleEnumerateFunctions(self, count, module):
        return OK, [cuda.CUfunction(0x3000 + index) for index in range(count)]

    def cuFuncLoad(self, handle):
        self.calls.append(("loaded", int(handle), self.contexts[-1]))
        return (OK,)

    def cuFuncGetName(self, handle):
        return OK, b"kernel_%d" % (int(handle) - 0x3000)

    def cuFuncGetParamInfo(self, handle, index):
        if index >= len(self.parameters):
            return BAD, None, None
        return OK, 0, self.parameters[index]

    def cuFuncGetAttribute(self, kind, handle):
        return OK, 49152 - STATIC_BYTES if kind == DYNAMIC else STATIC_BYTES

    def cuFuncSetAttribute(self, handle, kind, value):
        assert self.contexts[-1] == int(CONTEXT)
        self.prepared.append((kind, value))
        return (OK,)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, handle, block, shared_bytes):
        return OK, block

    def cuOccupancyMaxActiveClusters(self, handle, configuration):
        return OK, configuration.attrs[0].value.clusterDim.x

    def cuLaunchKernelEx(self, configuration, handle, parameters, extra):
        assert extra == 0
        argument = ctypes.c_void_p.from_address(parameters).value
        self.launches.append((configuration, ctypes.string_at(argument, self.parameters[0])))
        return (self.statuses.pop(0) if self.statuses else OK,)
