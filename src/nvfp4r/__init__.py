"""nvfp4r: the NVFP4 weight format, its quantiser, its checkpoints and a linear layer on them.

docs/format.md is the specification. `nvfp4r.hf` loads a checkpoint as a transformers model and is
not imported here, nor is `nvfp4r.vllm` before one of enable, disable, configure, status is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvfp4r.checkpoint import NVFP4Checkpoint, SaveReport, load_checkpoint, save_checkpoint
from nvfp4r.format import NVFP4Tensor
from nvfp4r.linear import NVFP4Linear
from nvfp4r.quantize import quantize, quantize_activations

if TYPE_CHECKING:
    from nvfp4r.vllm import configure, disable, enable, status

__all__ = [
    "NVFP4Checkpoint",
    "NVFP4Linear",
    "NVFP4Tensor",
    "SaveReport",
    "configure",
    "disable",
    "enable",
    "load_checkpoint",
    "quantize",
    "quantize_activations",
    "save_checkpoint",
    "status",
]
__version__ = "0.1.0"

_IN_VLLM = ("configure", "disable", "enable", "status")


def __getattr__(name: str) -> Any:
    if name not in _IN_VLLM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nvfp4r import vllm

    return getattr(vllm, name)
