"""ReSET inside vLLM; `reset.vllm:ReSETLogitsProcessor` is what the server is started with.

vLLM itself is imported when a class that needs it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reset.vllm.processor import ReSETAdapter, ReSETLogitsProcessor

__all__ = ["ReSETAdapter", "ReSETLogitsProcessor"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from reset.vllm import processor
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ImportError(
            f"{name} needs vLLM, which is not installed; pip install 'reset-decoding[vllm]'"
        ) from error
    return getattr(processor, name)
