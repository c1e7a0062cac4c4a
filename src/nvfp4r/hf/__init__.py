"""NVFP4 checkpoints and transformers models: loading one, and quantising with a model that runs.

What needs transformers is here and nowhere else in this package: `load_model`, and what methods
that look at inputs (AWQ, GPTQ, calibrated scales) need to see of a model.
"""

from nvfp4r.hf.load import load_model, saturation

__all__ = ["load_model", "saturation"]
