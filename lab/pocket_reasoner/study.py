"""The study: BF16 and NVFP4 under every policy, on problems that nothing was chosen on.

    python -m lab.pocket_reasoner.study             the full size, on a GPU
    python -m lab.pocket_reasoner.study --quick     two cores, under 15 minutes

quantises the model (W4A16 and W4A4), finds tau_0 and the temperatures of each form on calibration
problems, decodes evaluation problems in every arm, and compares. The folder (--output) then holds

    results.json, tables.md     every number, and the tables of docs/accuracy.md
    accuracy.png                both families, every arm
    measured-FORM.json          reports and examples of one form; --resume takes what is there
    shift-*, steps-*            the studies of reset.analyze, with figures (reset-analyze draws
                                them again from the dumps)
    models/, dump-*             what they were made from

The full size is 2 families x 500 problems x 8 seeds x 8 sampled arms and greedy once, for each of
three forms: 195,000 answers. The NVFP4 forms compute with dequantised weights, W4A4 with emulated
activations: the arithmetic of `nvfp4r.NVFP4Linear`, which its kernels are tested against; speed is
not what is measured here.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from lab.pocket_reasoner.decode import BatchEngine
from lab.pocket_reasoner.diagnostics import diagnose
from lab.pocket_reasoner.drawing import draw_accuracy
from lab.pocket_reasoner.measure import QUICK, Scale, measure_model
from lab.pocket_reasoner.problems import EVALUATION, FAMILIES, Difficulty, make_problems
from lab.pocket_reasoner.quantised import FORMS, quantise, write_texts
from lab.pocket_reasoner.results import REFERENCE, compare_all
from lab.pocket_reasoner.settings import difficulty_arguments, difficulty_of
from lab.pocket_reasoner.tables import markdown
from reset.analyze.figures import check_matplotlib
from reset.calibrate import folder_sha256
from reset.engine import DtypeName, package_versions
from reset.files import written_aside

_MODEL = Path(__file__).parent / "model"
_OUTPUT = Path(".cache") / "pocket-study"
_RESULTS = "results.json"


@dataclass(frozen=True)
class Plan:
    """What is studied, and on what.

    Args:
        model: BF16 folder.
        output: folder to make.
        scale: how much is decoded.
        difficulty: of the problems.
        dumped: evaluation problems of each family whose entropies are dumped.
        texts: worked calibration problems of each family that W4A4 takes its scales from.
        rows: answers decoded at once.
        device, dtype: of the computation.
        graphs: CUDA graphs, on a GPU.
        resume: take forms that were measured before with the same settings.
        figures: draw them, which needs matplotlib.
        quick: said in the results.
        command: said in the results.
    """

    model: Path
    output: Path
    scale: Scale
    difficulty: Difficulty
    dumped: int
    texts: int
    rows: int
    device: str
    dtype: DtypeName
    graphs: bool = True
    resume: bool = False
    figures: bool = True
    quick: bool = False
    command: str = ""

    def __post_init__(self) -> None:
        if not (self.model / "config.json").is_file():
            raise ValueError(
                f"{self.model}: holds no config.json; make a model with python -m "
                "lab.pocket_reasoner.train, or name another with --model"
            )
        if self.output.exists() and not self.resume:
            raise ValueError(f"{self.output}: is there already; choose another, or go on: --resume")
        if not 1 <= self.dumped <= self.scale.problems:
            raise ValueError(
                f"{self.dumped} problems a family are to be dumped; need 1 to "
                f"{self.scale.problems}, the evaluation problems"
            )


def run(plan: Plan) -> dict[str, Any]:
    """Do all of it; returns what results.json holds.

    Raises:
        ValueError: a form cannot be made or decoded.
        OSError: the disk is full.
    """
    began = time.monotonic()
    plan.output.mkdir(parents=True, exist_ok=True)
    folders = _make_forms(plan)
    measured = _measure_all(plan, folders)
    problems = [
        problem
        for family in FAMILIES
        for problem in make_problems(
            family, "evaluation", plan.scale.problems, difficulty=plan.difficulty
        )[: plan.dumped]
    ]
    diagnostics = diagnose(
        folders,
        problems,
        plan.output,
        max_tokens=plan.scale.max_tokens,
        tau_0={name: facts["calibration"]["tau_0_nats"] for name, facts in measured.items()},
        device=plan.device,
        dtype=plan.dtype,
        graphs=plan.graphs,
        figures=plan.figures,
        progress=_narrator(began),
    )
    results: dict[str, Any] = {
        "command": plan.command,
        "date": date.today().isoformat(),
        "quick": plan.quick,
        "device_name": _device_name(plan.device),
        "dtype": plan.dtype,
        "torch": torch.__version__,
        "versions": package_versions(),
        "scale": asdict(plan.scale),
        "difficulty": asdict(plan.difficulty),
        "models": {
            name: {key: value for key, value in facts.items() if key != "examples"}
            for name, facts in measured.items()
        },
        "comparisons": compare_all(measured),
        "diagnostics": diagnostics,
        "seconds": time.monotonic() - began,
    }
    results = _plain(results)
    _write_json(plan.output / _RESULTS, results)
    with written_aside(plan.output / "tables.md") as partial:
        partial.write_text(markdown(results), encoding="utf-8")
    if plan.figures:
        draw_accuracy(results, plan.output / "accuracy.png")
    return results


def _make_forms(plan: Plan) -> dict[str, Path]:
    """Folder of every form by name, the BF16 model first; the others are made if they are not."""
    models = plan.output / "models"
    models.mkdir(exist_ok=True)
    texts = models / "texts.jsonl"
    write_texts(texts, plan.texts, plan.difficulty)
    folders = {REFERENCE: plan.model}
    for form in FORMS:
        folders[form] = models / form
        if not folders[form].exists():
            print(f"quantising: {form}", flush=True)
            quantise(plan.model, folders[form], form, texts, plan.device)
    return folders


def _measure_all(plan: Plan, folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What was measured of every form, by name. On a CPU each has a process of its own.

    Those have one thread each: threads that share a product wait for each other, on a busy machine
    many times longer than they compute.
    """
    found = {name: _kept(plan, name, folder) for name, folder in folders.items()}
    # The last form takes longest, so it begins first.
    wanted = [name for name in reversed(folders) if found[name] is None]
    if plan.device != "cpu":
        for name in wanted:
            found[name] = _measure(plan, name, folders[name])
    elif wanted:
        workers = min(len(wanted), os.cpu_count() or 1)
        # Not forked: the parent holds threads.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, context, torch.set_num_threads, (1,)) as pool:
            work = {name: pool.submit(_measure, plan, name, folders[name]) for name in wanted}
            found |= {name: future.result() for name, future in work.items()}
    return {name: one for name, one in found.items() if one is not None}


def _settings(plan: Plan, folder: Path) -> dict[str, Any]:
    """What measurements depend on."""
    settings = {
        "model_sha256": folder_sha256(folder),
        "scale": asdict(plan.scale),
        "difficulty": asdict(plan.difficulty),
        "rows": plan.rows,
        "device": plan.device,
        "dtype": plan.dtype,
    }
    return _plain(settings)


def _kept(plan: Plan, name: str, folder: Path) -> dict[str, Any] | None:
    """What was measured before with the same settings; None if nothing was."""
    path = plan.output / f"measured-{name}.json"
    if not path.exists():
        return None
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if kept["settings"] != _settings(plan, folder):
        raise ValueError(
            f"{path}: was measured with other settings; use the same, or another --output"
        )
    return kept


def _measure(plan: Plan, name: str, folder: Path) -> dict[str, Any]:
    """What `measure_model` finds, kept on disk with what it depends on."""
    engine = BatchEngine.load(
        folder, rows=plan.rows, device=plan.device, dtype=plan.dtype, graphs=plan.graphs
    )
    began = time.monotonic()
    narrate = _narrator(began)
    found = measure_model(
        engine,
        plan.scale,
        plan.difficulty,
        lambda what, done, total: narrate(f"{name}: {what}", done, total),
    )
    settings = _settings(plan, folder)
    found = {"settings": settings, **found, "seconds": time.monotonic() - began}
    _write_json(plan.output / f"measured-{name}.json", found)
    return _plain(found)


def _narrator(began: float) -> Callable[[str, int, int], None]:
    """Says how far things are, every ten seconds and at the end of each."""
    last = [began]

    def narrate(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - last[0] > 10 or done == total:
            last[0] = now
            print(f"{now - began:7.1f} s  {what}: {done} of {total}", flush=True)

    return narrate


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As they will be read back."""
    read: dict[str, Any] = json.loads(json.dumps(values))
    return read


def _write_json(path: Path, value: Any) -> None:
    with written_aside(path) as partial:
        partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def parse(arguments: list[str] | None = None) -> Plan:
    """The plan of a command line.

    Raises:
        ValueError: flags that do not fit together.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--model", type=Path, default=_MODEL, help="BF16 model folder")
    parser.add_argument("--output", type=Path, help=f"folder to make ({_OUTPUT}, -quick)")
    parser.add_argument("--quick", action="store_true", help="few problems, for a CPU")
    parser.add_argument("--resume", action="store_true", help="go on with what is in --output")
    for name in asdict(Scale()):
        kind = float if name == "top_p" else int
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    parser.add_argument("--dumped", type=int, help="problems of each family for entropies")
    parser.add_argument("--texts", type=int, default=64, help="texts of each family for W4A4")
    parser.add_argument("--rows", type=int, help="answers decoded at once")
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs")
    parser.add_argument("--no-figures", action="store_true", help="draw nothing")
    difficulty_arguments(parser)
    given = parser.parse_args(arguments)
    scale = QUICK if given.quick else Scale()
    chosen = {name: getattr(given, name) for name in asdict(scale)}
    scale = replace(scale, **{k: v for k, v in chosen.items() if v is not None})
    on_gpu = given.device.startswith("cuda")
    dumped = given.dumped or min(scale.problems, 8 if given.quick else 64)
    return Plan(
        model=given.model,
        output=given.output or Path(f"{_OUTPUT}-quick" if given.quick else _OUTPUT),
        scale=scale,
        difficulty=difficulty_of(given, EVALUATION),
        dumped=dumped,
        texts=given.texts,
        rows=given.rows or (4096 if on_gpu else 128),
        device=given.device,
        dtype=given.dtype or ("bfloat16" if on_gpu else "float32"),
        graphs=not given.no_graphs,
        resume=given.resume,
        figures=not given.no_figures,
        quick=given.quick,
        command=_told(sys.argv[1:] if arguments is None else arguments),
    )


def _told(words: Sequence[str]) -> str:
    """The command as others would give it: folders by their names, wherever they are here."""
    pairs = zip(["", *words], words, strict=False)
    told = [Path(word).name if flag in ("--output", "--model") else word for flag, word in pairs]
    return f"python -m lab.pocket_reasoner.study {shlex.join(told)}"


def main() -> None:
    try:
        plan = parse()
        if plan.figures:
            check_matplotlib()
        if plan.device == "cpu":
            torch.set_num_threads(1)  # as in `_measure_all`
        results = run(plan)
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"error: {error}") from error
    print(markdown(results))


if __name__ == "__main__":
    main()
