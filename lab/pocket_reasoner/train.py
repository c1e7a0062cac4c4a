"""Trains the pocket reasoner from scratch: one command, one model folder.

    python -m lab.pocket_reasoner.train --output FOLDER --steps 4065

trains the model of the repository again, as far as a GPU repeats itself. That one came of
`--minutes 3.7` on an H200 (bfloat16 autocast, torch.compile, torch 2.11, 2026-11-30): 4,065 steps
of 64 rows x 1,024 tokens, 266 million tokens, in 2.7 minutes, compilation and evaluations included.
The first step was done after 54 s, and 15 s were spent waiting for the data of 6 processes. One
process makes half a million tokens a second.

How many steps fit into `--minutes` is estimated from their speed, and lowered if they slow down, so
that the learning rate ends at zero with the time; it is not raised if they turn out faster.
`--steps` fixes the number beforehand. Data, weights and order depend on `--seed` alone. The
accuracy along the way is on calibration problems: nobody looks at evaluation problems here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lab.pocket_reasoner.arithmetic import Chain
from lab.pocket_reasoner.card import write_card
from lab.pocket_reasoner.curve import (
    CURVE_FIGURE,
    CURVE_FILE,
    LearningCurve,
    draw_curve,
    require_matplotlib,
)
from lab.pocket_reasoner.data import IGNORED, Stream, chunks
from lab.pocket_reasoner.forward import rotary_tables, text_logits
from lab.pocket_reasoner.model import (
    MAX_POSITIONS,
    Sizes,
    new_model,
    parameter_count,
    save_model,
)
from lab.pocket_reasoner.problems import FAMILIES, TRAINING, Difficulty, Family, make_problems
from lab.pocket_reasoner.scoring import greedy_accuracy
from lab.pocket_reasoner.search import Search
from lab.pocket_reasoner.settings import difficulty_arguments, difficulty_of

_TIMED = (10, 40)  # speed is measured from the first on, once everything is compiled; every 40
_RESERVE = 0.06  # share of the time that is kept for the last evaluation and for saving


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Args:
        minutes: limit on everything, compilation and evaluation included.
        steps: of the optimiser, at most; None: as many as fit into `minutes`.
        rows: of a step.
        length: tokens of a row.
        learning_rate: at its peak; linear warm-up, then a cosine down to 0.
        warmup: steps.
        weight_decay: of AdamW, on matrices.
        seed: of weights and data.
        evaluations: how often accuracy is measured along the way.
        problems: of each family, for that.
        max_tokens: of an answer there.
        processes: that make data.
        device: torch device.
        autocast: bfloat16 in the forward pass.
        compiled: torch.compile.
    """

    minutes: float = 8.0
    steps: int | None = None
    rows: int = 64
    length: int = MAX_POSITIONS
    learning_rate: float = 2e-3
    warmup: int = 200
    weight_decay: float = 0.1
    seed: int = 0
    evaluations: int = 6
    problems: int = 100
    max_tokens: int = 640
    processes: int = 0
    device: str = "cpu"
    autocast: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        for name in ("minutes", "rows", "learning_rate", "evaluations", "problems", "max_tokens"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps is {self.steps}; it must be at least 1")
        if not 2 <= self.length <= MAX_POSITIONS:
            raise ValueError(f"length is {self.length}; it must be between 2 and {MAX_POSITIONS}")
        if self.warmup < 1 or self.processes < 0 or self.weight_decay < 0:
            raise ValueError(
                f"warmup {self.warmup}, processes {self.processes}, weight_decay "
                f"{self.weight_decay}; need warmup >= 1 and the others >= 0"
            )


def train(
    plan: Training, sizes: Sizes, difficulty: Difficulty, output: Path, *, figure: bool = True
) -> dict[str, Any]:
    """Train a model and write its folder; returns what the model card says.

    `figure` is whether the learning curve is drawn, which needs matplotlib.

    Raises:
        ValueError: `output` is there already, or its parent is not; an example is too long.
        FloatingPointError: the loss is no longer finite.
    """
    if output.exists() or not output.parent.is_dir():
        raise ValueError(f"{output}: need a new folder within one that exists")
    began = time.monotonic()
    watched = {
        family: make_problems(family, "calibration", plan.problems, difficulty=difficulty)
        for family in FAMILIES
    }
    model: Any = new_model(sizes, plan.seed)
    model.to(plan.device)
    output.mkdir()

    def evaluate() -> dict[str, float]:
        save_model(model, output)  # what is there is as old as the last measurement at most
        return _evaluate(plan, model, watched)

    with LearningCurve(output / CURVE_FILE) as curve:
        done = _run(plan, difficulty, model, curve, began, evaluate)
    if figure:
        draw_curve(curve.points, output / CURVE_FIGURE)
    facts = {
        "parameters": parameter_count(model),
        "sizes": asdict(sizes),
        "training": asdict(plan),
        "difficulty": asdict(difficulty),
        **done,
        "seconds": time.monotonic() - began,
        "device_name": _device_name(plan.device),
        "torch": torch.__version__,
    }
    (output / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    write_card(output, facts)
    return facts


def _run(
    plan: Training,
    difficulty: Difficulty,
    model: Any,
    curve: LearningCurve,
    began: float,
    evaluate: Callable[[], dict[str, float]],
) -> dict[str, Any]:
    optimizer = _optimizer(model, plan)
    tables = rotary_tables(model, plan.length, torch.float32)
    loss_of = torch.compile(_loss) if plan.compiled else _loss
    stream = Stream(difficulty, plan.seed, plan.length, plan.rows)
    kind = torch.device(plan.device).type
    limit = 60 * plan.minutes
    total = plan.steps or 10**9
    tokens = waited = timed_from = 0.0
    accuracy: dict[str, float] = {}
    with chunks(stream, total, plan.processes) as batches:
        step, asked = 0, time.monotonic()
        for ids, targets in batches:
            waited += time.monotonic() - asked
            rate = _learning_rate(plan, step, total)
            for group in optimizer.param_groups:
                group["lr"] = rate
            on_device = _on_device(ids, plan.device), _on_device(targets, plan.device)
            with torch.autocast(kind, torch.bfloat16, enabled=plan.autocast):
                loss = loss_of(model, *on_device, tables)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step, tokens = step + 1, tokens + ids.size
            if step == _TIMED[0]:
                timed_from = _now(plan.device)
            if step >= _TIMED[1] and step % _TIMED[1] == 0:
                a_step = (_now(plan.device) - timed_from) / (step - _TIMED[0])
                left = (1 - _RESERVE) * limit - (time.monotonic() - began)
                total = min(total, step + max(1, int(left / a_step)))
            seconds = time.monotonic() - began
            over = seconds > limit
            is_last = step >= total or over
            if is_last or step == 1 or step % 20 == 0:
                value = float(loss.detach())
                if not math.isfinite(value):
                    raise FloatingPointError(
                        f"the loss is {value} at step {step}; lower --learning-rate"
                    )
                curve.add(step=step, tokens=int(tokens), seconds=seconds, loss=value, rate=rate)
            if is_last or (total < 10**9 and step % max(1, total // plan.evaluations) == 0):
                accuracy = evaluate()
                curve.add(step=step, tokens=int(tokens), seconds=seconds, **accuracy)
                print(f"step {step} of {total}: {accuracy}", flush=True)
            if is_last:
                break
            asked = time.monotonic()
    return {
        "steps": step,
        "tokens": int(tokens),
        "waited_for_data_seconds": waited,
        "stopped_by_the_clock": over and step < total,
        "calibration_accuracy": accuracy,
    }


def _loss(model: Any, ids: Tensor, targets: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    logits = text_logits(model, ids, tables)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


def _on_device(numbers: NDArray[Any], device: str) -> Tensor:
    return torch.from_numpy(numbers).to(device, non_blocking=True).long()


def _evaluate(
    plan: Training, model: Any, watched: Mapping[Family, Sequence[Chain | Search]]
) -> dict[str, float]:
    dtype = torch.bfloat16 if plan.device.startswith("cuda") else torch.float32
    return {
        family: greedy_accuracy(model, problems, max_tokens=plan.max_tokens, dtype=dtype)
        for family, problems in watched.items()
    }


def _optimizer(model: Any, plan: Training) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": plan.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = plan.device.startswith("cuda")
    return torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95), fused=fused)


def _learning_rate(plan: Training, step: int, total: int) -> float:
    if step < plan.warmup:
        return plan.learning_rate * (step + 1) / plan.warmup
    share = min(1.0, (step - plan.warmup) / max(1, total - plan.warmup))
    return plan.learning_rate * (1 + math.cos(math.pi * share)) / 2


def _now(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.monotonic()


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="model folder to make")
    for group, defaults in (("training", Training()), ("sizes", Sizes())):
        options = parser.add_argument_group(group)
        for name, value in asdict(defaults).items():
            if not isinstance(value, bool) and name != "device":
                kind = int if value is None else type(value)
                options.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=has_gpu)
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=has_gpu)
    difficulty_arguments(parser)
    parser.add_argument("--no-figure", action="store_true", help="do not draw the learning curve")
    arguments = parser.parse_args()
    if not arguments.no_figure:
        require_matplotlib()
    torch.set_float32_matmul_precision("high")
    given = vars(arguments)
    plan = Training(**{name: given[name] for name in asdict(Training())})
    if not plan.processes and has_gpu:
        plan = replace(plan, processes=max(1, (os.cpu_count() or 1) - 2))
    sizes = Sizes(**{name: given[name] for name in asdict(Sizes())})
    facts = train(
        plan,
        sizes,
        difficulty_of(arguments, TRAINING),
        arguments.output,
        figure=not arguments.no_figure,
    )
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
