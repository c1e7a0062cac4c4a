"""Run inside an empty environment after installing the wheel: everything it promises is there.

Not a pytest file: that environment has no pytest. `make wheel` calls it.
"""

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

import nvfp4r
import reset
from reset.trace.page import render_page
from reset.trace.record import Trace

for package in (reset, nvfp4r):
    location = Path(package.__file__).resolve()
    assert Path(sys.prefix).resolve() in location.parents, f"{location} is not the installed wheel"
assert metadata.version("reset-decoding") == reset.__version__

config = reset.ReSETConfig.preset("Qwen3-8B")  # needs presets.json
policy = reset.TemperaturePolicy(config, slots=1)
assert policy.step(torch.tensor([2.0]), torch.tensor([False])).item() == 1.0

tensor = nvfp4r.quantize(torch.ones(16, 32))
assert torch.equal(tensor.dequantize(), torch.ones(16, 32))

trace = Trace("m", "p", config.to_dict(), 0, (), "stop", None, {})
assert "<script" in render_page(trace)  # needs the page's template, style and script

for command in ("reset-quantize", "reset-generate", "reset-calibrate", "nvfp4r"):
    path = shutil.which(command, path=str(Path(sys.executable).parent))
    assert path, f"{command} is not installed"
    subprocess.run([path, "--help"], check=True, stdout=subprocess.DEVNULL)
print(f"wheel {reset.__version__}: imports, data files and commands are in place")
