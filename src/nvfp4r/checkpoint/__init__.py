"""NVFP4 checkpoints on disk: both dialects, read and written tensor by tensor, checked both ways.

docs/format.md is the specification. Knows files and their configuration, not models.
"""

from nvfp4r.checkpoint.reader import NVFP4Checkpoint, load_checkpoint
from nvfp4r.checkpoint.writer import SaveReport, save_checkpoint

__all__ = ["NVFP4Checkpoint", "SaveReport", "load_checkpoint", "save_checkpoint"]
