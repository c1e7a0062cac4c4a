"""The model card, made from what a training measured: no number in it comes from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_TEXT = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# Pocket reasoner

A causal language model of {parameters:,} parameters (Qwen3 architecture) that reasons in steps:
chains of integer arithmetic, one result after the other, and searches for an expression that makes
a target. It was trained from scratch on generated problems, as an object of study for samplers and
quantisers. It knows no language and no facts.

    python -m lab.pocket_reasoner.problems --count 100 > problems.jsonl
    reset-run --model FOLDER --task jsonl --data problems.jsonl --prompt plain \\
        --baseline --base-temp 0.6 --max-tokens 640 --output runs/pocket

| what | value |
|---|---|
| hidden size, layers | {hidden}, {layers} |
| heads, key-value heads, head size | {heads}, {key_value_heads}, {head_dim} |
| intermediate size | {intermediate} |
| vocabulary | 128 tokens: characters, single digits, "\\n", "\\n\\n", the words of the problems |
| positions | 1,024 |
| weights | bfloat16, {megabytes:.1f} MB |

## Data

Made by `lab/pocket_reasoner` with seed {seed}: {tokens:,} tokens of problems with worked solutions
(chains of {chain_steps} operations on numbers of {chain_digits} digits; searches with
{search_numbers} numbers). Loss was taken on solutions alone. Problems whose hash names the
calibration or evaluation split were left out.

## Training

{steps:,} steps of {rows} x {length:,} tokens in {minutes:.1f} minutes on {device_name}
(torch {torch}), compilation and evaluations included; {waited:.0f} s of them were spent waiting
for data. The curve is learning_curve.png, its numbers learning_curve.jsonl; every setting is in
training.json.

## Accuracy

Greedy, {problems} calibration problems a family, as hard as those of the training:

| family | solved |
|---|---|
{accuracy}

The study on evaluation problems is `python -m lab.pocket_reasoner.study`; docs/accuracy.md says
what came out.

## Limits

Numbers beyond those lengths, other wordings and any other task are outside of what it was trained
on. What a quantiser or a sampler does to it need not carry over to a large model.

## Licence

Apache-2.0, as the repository.
"""


def write_card(folder: Path, facts: dict[str, Any]) -> None:
    """Write README.md into a model folder.

    Args:
        folder: of the model, with its weights in it.
        facts: what `train.train` returns.
    """
    training, chain = facts["training"], facts["difficulty"]["chain"]
    rows = [f"| {name} | {100 * x:.1f} % |" for name, x in facts["calibration_accuracy"].items()]
    text = _TEXT.format(
        parameters=facts["parameters"],
        megabytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6,
        **facts["sizes"],
        seed=training["seed"],
        tokens=facts["tokens"],
        chain_steps=_range(chain["steps"]),
        chain_digits=_range(chain["digits"]),
        search_numbers=_range(facts["difficulty"]["search"]["numbers"]),
        steps=facts["steps"],
        rows=training["rows"],
        length=training["length"],
        minutes=facts["seconds"] / 60,
        device_name=facts["device_name"],
        torch=facts["torch"],
        waited=facts["waited_for_data_seconds"],
        problems=training["problems"],
        accuracy="\n".join(rows),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _range(pair: tuple[int, int]) -> str:
    low, high = pair
    return str(low) if low == high else f"{low} to {high}"
