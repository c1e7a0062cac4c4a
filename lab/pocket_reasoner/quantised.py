"""The NVFP4 forms of a model, made by `reset-quantize` as anybody would make them.

Activation scales of W4A4 come from worked solutions of calibration problems. Decodes nothing.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

from lab.pocket_reasoner.problems import FAMILIES, Difficulty, make_problems, solution
from lab.pocket_reasoner.tokenizer import conversation
from reset.files import written_aside

FORMS = {"w4a16": "none", "w4a4": "nvfp4"}
"""Name of a form, and what `reset-quantize --activations` says for it."""


def write_texts(path: Path, count: int, difficulty: Difficulty) -> None:
    """Write `count` worked calibration problems of each family, a JSON object a line."""
    draw = random.Random("quantiser texts")
    lines = [
        json.dumps({"text": conversation(one.question, solution(one, draw, difficulty))})
        for family in FAMILIES
        for one in make_problems(family, "calibration", count, difficulty=difficulty, seed=1)
    ]
    with written_aside(path) as partial:
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")


def quantise(model: Path, output: Path, form: str, texts: Path, device: str) -> None:
    """Make one form of `model` in the new folder `output`.

    Raises:
        ValueError: no such form, or reset-quantize refused; its message is passed on.
    """
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; it must be one of {', '.join(FORMS)}")
    flags = ["--model", str(model), "--output", str(output), "--activations", FORMS[form]]
    if form == "w4a4":
        flags += ["--calib-data", str(texts)]
    command = [sys.executable, "-m", "reset.cli.quantize", *flags, "--device", device, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"reset-quantize {' '.join(flags)} failed: {done.stderr.strip()}")
