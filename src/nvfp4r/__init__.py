"""nvfp4r: the NVFP4 weight format, its quantiser, its checkpoints and a linear layer on them.

docs/format.md is the specification. `nvfp4r.hf` loads a checkpoint as a transformers model and is
not imported here.
"""

from nvfp4r.checkpoint import NVFP4Checkpoint, load_checkpoint
from nvfp4r.format import NVFP4Tensor
from nvfp4r.linear import NVFP4Linear
from nvfp4r.quantize import quantize, quantize_activations
from nvfp4r.writer import SaveReport, save_checkpoint

__all__ = [
    "NVFP4Checkpoint",
    "NVFP4Linear",
    "NVFP4Tensor",
    "SaveReport",
    "load_checkpoint",
    "quantize",
    "quantize_activations",
    "save_checkpoint",
]
__version__ = "0.1.0"
