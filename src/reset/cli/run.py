"""`reset-run`: score a model on a task, and compare runs."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from nvfp4r.console import error_boundary, notes, output
from reset.calibrate import text_sha256
from reset.cli import engines, options
from reset.cli.check import check
from reset.cli.run_tables import answer_progress, comparison_table, score_table
from reset.config import ReSETConfig
from reset.evaluate.compare import Comparison, compare, read_run
from reset.evaluate.engines import Engine
from reset.evaluate.figure import require_matplotlib, write_comparison
from reset.evaluate.graders import Grader, grader_versions
from reset.evaluate.recipes import arm_plan, read_recipe
from reset.evaluate.runner import Grader as GradeCall
from reset.evaluate.runner import RunPlan, run
from reset.evaluate.store import SCORES, SETTINGS, SPEED, check_run_target
from reset.evaluate.tasks import TASKS, IdRule, Task, load_task
from reset.presets import read_entry, split_preset, used_problems

DEFAULT_COMMAND = "score"


class _ScoreByDefault(TyperGroup):
    """`reset-run --task ...` is `reset-run score --task ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = [DEFAULT_COMMAND, *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(cls=_ScoreByDefault, add_completion=False, no_args_is_help=True)


@app.callback()
def about() -> None:
    """Score a model on a task, and tell a real difference from noise.

    Without a command's name: score. Its flags: reset-run score --help.
    """


@app.command(DEFAULT_COMMAND)
def score(
    model: options.Model,
    task: Annotated[str, typer.Option(help=f"One of {', '.join(TASKS)}.")],
    output_folder: Annotated[
        Path, typer.Option("--output", help="Folder of the run; with --recipe, of all its runs.")
    ],
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Problems (.jsonl) instead of the hub's; may be given several times."),
    ] = None,
    ids: Annotated[
        IdRule,
        typer.Option(help="Task jsonl: name problems by their id, or by their content."),
    ] = "file",
    engine: engines.EngineName = "hf",
    t_low: options.TLow = None,
    tau0: options.Tau0 = None,
    t_high: options.THigh = None,
    window: options.Window = None,
    policy: options.Policy = None,
    estimator: options.Estimator = None,
    preset: options.Preset = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="One fixed temperature, --base-temp, for all tokens.")
    ] = False,
    base_temp: options.BaseTemp = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Run every arm of a recipe (.yaml), then compare them.")
    ] = None,
    backend: engines.Backend = "auto",
    n_samples: Annotated[int, typer.Option(help="Answers to each problem.")] = 8,
    max_tokens: Annotated[
        int | None, typer.Option(help="Output limit of an answer; the task's own if left out.")
    ] = None,
    top_p: options.TopP = 0.95,
    min_p: Annotated[float, typer.Option(help="[0, 1); 0 is off.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Sample k belongs to seed + k.")] = 0,
    thinking: engines.Thinking = None,
    prompt: engines.Prompt = "task",
    system: Annotated[str | None, typer.Option(help="System prompt of the chat template.")] = None,
    max_problems: Annotated[int | None, typer.Option(help="Only the first so many.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --output.")
    ] = False,
    device: engines.Device = None,
    dtype: options.Dtype = "auto",
    activations: options.Activations = "checkpoint",
    tp: engines.TensorParallel = 1,
    concurrency: engines.Concurrency = 8,
    timeout: engines.Timeout = 3600.0,
    retries: engines.Retries = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    debug: options.Debug = False,
) -> None:
    """Score a model: n answers to each problem, graded and kept one by one.

    Needs --preset, or --t-low and --tau0: both belong to the model; or --baseline. A run that was
    stopped goes on with the same command and --resume.
    """
    with error_boundary(debug), ExitStack() as open_files:
        if baseline and policy not in (None, "reset", "fixed"):
            raise ValueError(f"--baseline and --policy {policy} exclude each other; drop one")
        config = options.policy_config(
            preset=preset,
            t_low=t_low,
            tau0=tau0,
            t_high=t_high,
            window=window,
            policy="fixed" if baseline else policy,
            estimator=estimator,
            base_temp=base_temp,
        )
        arms = {}
        if recipe is not None:
            require_matplotlib()
            arms = read_recipe(recipe)
        choice = engines.Choice(
            name=engine,
            model=model,
            backend=backend,
            device=device,
            dtype=dtype,
            activations=activations,
            tp=tp,
            concurrency=concurrency,
            timeout_s=timeout,
            retries=retries,
            thinking=thinking,
        )
        if recipe is None:
            check_run_target(output_folder, resume=resume)
        loaded = load_task(task, data or (), max_problems=max_problems, ids=ids)
        _check_overlap(loaded, preset)
        grader = open_files.enter_context(Grader())
        protection = grader.check(loaded.problems)
        plan = RunPlan(
            task=loaded,
            config=config,
            n_samples=n_samples,
            seed=seed,
            max_tokens=max_tokens,
            top_p=top_p,
            min_p=min_p,
            prompt=prompt,
            system=system,
            grading=grader_versions(),
        )
        plans = {name: arm_plan(plan, settings) for name, settings in arms.items()} or {"": plan}
        if recipe is not None:
            _make_folder(output_folder)
            for name in plans:
                check_run_target(output_folder / name, resume=resume)
        _remark(loaded, plans, protection)
        source = engines.open_engine(choice)
        for name, one in plans.items():
            notes().print(f"[dim]{name or task}: {one.config}[/dim]")
            _run_one(one, source, grader.grade, output_folder / name, resume, name or task)
        if recipe is None:
            _print_run(output_folder, as_json)
        else:
            compared = compare([read_run(output_folder / name) for name in plans])
            _print_comparison(compared, output_folder, as_json)


@app.command("report")
def report_command(
    run_folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    debug: options.Debug = False,
) -> None:
    """Print the score of a finished run again."""
    with error_boundary(debug):
        read_run(run_folder)
        _print_run(run_folder, as_json)


app.command("check")(check)


@app.command("compare")
def compare_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; the first is the baseline.")],
    output_folder: Annotated[
        Path | None, typer.Option("--output", help="Folder for comparison.json, .png and .svg.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
    debug: options.Debug = False,
) -> None:
    """Compare runs with the first, problem by problem: one table, one figure.

    "no difference shown" means that chance may have made the difference; it does not mean that the
    runs are equal.
    """
    with error_boundary(debug):
        if output_folder is not None and not output_folder.parent.is_dir():
            raise ValueError(f"--output: folder {output_folder.parent} does not exist; create it")
        _print_comparison(compare([read_run(path) for path in runs]), output_folder, as_json)


def _run_one(
    plan: RunPlan, engine: Engine, grade: GradeCall, folder: Path, resume: bool, title: str
) -> None:
    try:
        with answer_progress(title) as advance:
            run(plan, engine, grade, folder, resume=resume, on_progress=advance)
    except KeyboardInterrupt:
        notes().print(f"stopped; what came is kept in {folder}: go on with --resume")
        raise


def _check_overlap(task: Task, preset: str | None) -> None:
    """Refuses to score on problems that the parameters were chosen on."""
    place = split_preset(preset) if preset is not None else None
    if place is None:
        return
    used = used_problems(read_entry(*place))
    both = [one.id for one in task.problems if text_sha256(one.question) in used]
    if both:
        raise ValueError(
            f"{preset} was calibrated on {len(both)} problems of this task ({both[0]}, ...), so "
            "their score would favour it; calibrate on other problems"
        )


def _make_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise ValueError(f"--output: folder {path.parent} does not exist; create it first")
    path.mkdir(exist_ok=True)


def _remark(task: Task, plans: dict[str, RunPlan], protection: dict[str, bool]) -> None:
    missing = [name for name, there in protection.items() if not there]
    if missing:
        notes().print(f"the sandbox for programs lacks, on this machine: {', '.join(missing)}")
    if task.expected is not None and len(task.problems) != task.expected:
        notes().print(
            f"{task.name} has {task.expected} problems, these data hold {len(task.problems)}: say "
            "so beside the score"
        )
    for name, plan in plans.items():
        if plan.n_samples > 1 and _is_greedy(plan.config):
            notes().print(f"{name or 'this policy'} is greedy: all samples of a problem are alike")


def _is_greedy(config: ReSETConfig) -> bool:
    return config.policy == "fixed" and config.may_be_greedy


def _print_run(folder: Path, as_json: bool) -> None:
    scores, speed, settings = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in (SCORES, SPEED, SETTINGS)
    )
    if as_json:
        print(json.dumps({"settings": settings, "scores": scores, "speed": speed}, indent=2))
        return
    output().print(score_table(scores, speed))
    notes().print(f"everything is in {folder}")


def _print_comparison(comparison: Comparison, folder: Path | None, as_json: bool) -> None:
    if as_json:
        print(json.dumps(comparison.to_dict(), indent=2))
    else:
        output().print(comparison_table(comparison))
    for remark in comparison.remarks:
        notes().print(remark)
    if folder is not None:
        paths = write_comparison(comparison, folder)
        notes().print(f"written: {', '.join(map(str, paths))}")


def main() -> None:
    """Entry point of `reset-run`."""
    app()


if __name__ == "__main__":
    main()
