"""ReSET: a step-aware sampling temperature for reasoning models.

The core needs torch alone. Adapters live in `reset.hf` and `reset.vllm`; an adapter imports its
engine, and nothing here imports an adapter before it is asked for.
"""

from typing import Any

from reset.config import ReSETConfig
from reset.entropy import entropy_nats
from reset.policy import Decision, TemperaturePolicy
from reset.sampler import scale_logits
from reset.steps import StepDetector

__all__ = [
    "Decision",
    "ReSETConfig",
    "StepDetector",
    "TemperaturePolicy",
    "entropy_nats",
    "scale_logits",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # For scripts written for the public reference; not in __all__, since the first needs vLLM.
    if name == "ReSETAdapter":
        from reset.vllm import ReSETAdapter

        return ReSETAdapter
    if name == "get_newline_token_ids":
        from reset.compat import get_newline_token_ids

        return get_newline_token_ids
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
