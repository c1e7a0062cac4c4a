"""The whole path on one machine: quantise a small model, calibrate it, answer with ReSET.

    make demo        (or: python examples/demo.py --model .cache/smollm2-135m --work .cache/demo)

from the top of the repository. Every stage is a command that you can run yourself; each is printed
before it runs. Stages whose result exists already are skipped. SmolLM2-135M is too small to be
right: look at the temperatures, not at the answer.

In the second act the pocket reasoner (lab/) in NVFP4 solves a problem of each of its families, and
an exact checker judges it. Where the repository holds no trained one, the act is left out.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
POCKET = ROOT / "lab" / "pocket_reasoner" / "model"
QUESTIONS = Path(__file__).parent / "data" / "questions.jsonl"
PROMPT = "What is 17 times 24? Think step by step."


def run(module: str, command: str, *arguments: str) -> None:
    """Run one of the commands in this Python, showing it as a user would type it."""
    print(f"\n$ {command} {shlex.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)


def second_act(pocket: Path, work: Path) -> None:
    """The pocket reasoner: quantised, then at work."""
    if not (pocket / "config.json").exists():
        print(f"\nno second act: {pocket} holds no model (lab/pocket_reasoner/train.py makes one)")
        return
    nvfp4 = work / "pocket-nvfp4"
    if not nvfp4.exists():
        run(
            "reset.cli.quantize",
            "reset-quantize",
            *("--model", str(pocket), "--output", str(nvfp4), "--activations", "none"),
        )
    run(
        "lab.pocket_reasoner.show",
        "python -m lab.pocket_reasoner.show",
        *("--model", str(nvfp4), "--output", str(work)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="bf16 model folder")
    parser.add_argument("--work", type=Path, required=True, help="folder for what is made")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--seed", default="7")
    arguments = parser.parse_args()
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    nvfp4, calibration = work / "model-nvfp4", work / "calibration.json"

    if not nvfp4.exists():
        run(
            "reset.cli.quantize",
            "reset-quantize",
            *("--model", arguments.model, "--output", str(nvfp4), "--activations", "none"),
        )
    if not calibration.exists():
        # T_high 1.0 belongs to long-reasoning models; a small instruct model does better at 0.6.
        run(
            "reset.cli.calibrate",
            "reset-calibrate",
            *("--model", str(nvfp4), "--data", str(QUESTIONS), "--num-problems", "6"),
            *("--max-tokens", "160", "--t-low", "0.1", "--t-high", "0.6"),
            *("--output", str(calibration)),
        )
    run(
        "reset.cli.generate",
        "reset-generate",
        *("--model", str(nvfp4), "--prompt", arguments.prompt, "--preset", str(calibration)),
        *("--max-tokens", "300", "--seed", arguments.seed),
        *("--trace", str(work / "trace.html"), "--figure", str(work / "trace.png")),
    )
    second_act(POCKET, work)


if __name__ == "__main__":
    main()
