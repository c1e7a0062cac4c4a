"""The CUDA kernels of this package: compiled on first use, kept on disk, loaded, launched.

Importing this needs torch alone; compiling needs NVRTC, launching a GPU, both the `gpu` extra.
"""

from nvfp4r.jit.arch import (
    FURTHER_TARGETS,
    TARGETS,
    Target,
    UnsupportedGPUError,
    target_for,
    target_named,
)
from nvfp4r.jit.cache import cache_folder, cached_cubin, cubin_for
from nvfp4r.jit.compile import CompileError, Cubin, Resources, compile_cubin, resources
from nvfp4r.jit.launch import Kernel, Launch
from nvfp4r.jit.module import Module, load_cubin, load_module
from nvfp4r.jit.sources import ENTRY, kernel_sources

__all__ = [
    "ENTRY",
    "FURTHER_TARGETS",
    "TARGETS",
    "CompileError",
    "Cubin",
    "Kernel",
    "Launch",
    "Module",
    "Resources",
    "Target",
    "UnsupportedGPUError",
    "cache_folder",
    "cached_cubin",
    "compile_cubin",
    "cubin_for",
    "kernel_sources",
    "load_cubin",
    "load_module",
    "resources",
    "target_for",
    "target_named",
]
