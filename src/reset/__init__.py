"""ReSET: a step-aware sampling temperature for reasoning models.

The core needs torch alone. Adapters live in `reset.hf`; an adapter imports its engine, and nothing
here imports an adapter.
"""

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
