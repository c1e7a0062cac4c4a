"""A problem of each family, solved before your eyes: steps as they come, verdict, trace page.

    python -m lab.pocket_reasoner.show --model NVFP4_FOLDER --output FOLDER

finds tau_0 of the model on calibration problems, then answers the first evaluation problem of each
family with ReSET, both as hard as those of the training. Whatever it answers is shown, and an exact
checker says whether it is right. pocket-chain.html and pocket-search.html have the numbers behind
every token.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lab.pocket_reasoner.arithmetic import Chain
from lab.pocket_reasoner.arms import TAU_0_TEMPERATURE
from lab.pocket_reasoner.decode import BatchEngine
from lab.pocket_reasoner.grading import as_task_problem, grade
from lab.pocket_reasoner.problems import FAMILIES, Family, make_problems
from lab.pocket_reasoner.search import Search
from lab.pocket_reasoner.trained import read_trained
from reset.calibrate import percentile_threshold
from reset.config import ReSETConfig
from reset.engine import Engine, answer, generate, load_engine, make_prompt
from reset.evaluate.engines import Request
from reset.evaluate.graders.verdict import Grade
from reset.evaluate.problems import Answer
from reset.trace.page import write_page
from reset.trace.record import Trace

_STYLES = {" yes": "bold green", " no": "bold red", "back ": "yellow"}
"""Of the words by which a search judges itself; each is one token."""

_CALIBRATION_PROBLEMS = 4  # of each family, for tau_0
_CALIBRATION_TOKENS = 256  # of an answer there, at most: entropies count, not answers
_TOP_P = 0.95


class StepWriter:
    """Writes a text as its tokens come, every step with its number; words of judgement coloured."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._step = 0
        self._in_box = False

    def push(self, piece: str) -> None:
        """The text of one token."""
        if self._step == 0:
            self._begin()
        self._in_box = self._in_box or piece == "\\boxed{"
        style = "bold" if self._in_box else _STYLES.get(piece, "")
        for number, line in enumerate(piece.split("\n\n")):
            if number:
                self._console.print()
                self._begin()
            # The lines of a step stand below each other.
            self._write(line.replace("\n", "\n" + " " * 7), style)

    def _begin(self) -> None:
        self._step += 1
        self._write(f"{self._step:4d}   ", "dim")

    def _write(self, text: str, style: str) -> None:
        self._console.print(Text(text, style), end="", soft_wrap=True)


def find_tau_0(engine: Engine, problems: Sequence[Chain | Search], max_tokens: int) -> float:
    """The 80th percentile of the model's own token entropies on `problems`, in nats."""
    config = ReSETConfig(policy="fixed", base_temp=TAU_0_TEMPERATURE)
    requests = [
        Request((("user", problem.question),), number, config, max_tokens, _TOP_P)
        for number, problem in enumerate(problems)
    ]
    batch = BatchEngine(engine.model, engine.tokenizer, rows=len(requests))
    return percentile_threshold([one.entropy_nats for _, one in batch.decode(requests)])


def solve(
    engine: Engine,
    problem: Chain | Search,
    config: ReSETConfig,
    max_tokens: int,
    seed: int,
    console: Console,
) -> tuple[Trace, Grade]:
    """Answer one problem, shown as it comes; what happened, and whether it is right."""
    console.print(f"\n[bold]{problem.question}[/bold]\n", highlight=False)
    (trace,) = generate(
        engine,
        [make_prompt(engine, problem.question)],
        config,
        max_new_tokens=max_tokens,
        top_p=_TOP_P,
        seed=seed,
        on_text=StepWriter(console).push,
    )
    console.print()
    given = Answer(answer(engine, trace), trace.finish_reason, len(trace.tokens))
    verdict = grade(given, as_task_problem(problem))
    told = "[bold green]right[/bold green]" if verdict.correct else "[bold red]wrong[/bold red]"
    console.print(f"\nchecker: {told}: {verdict.detail}", highlight=False)
    return trace, verdict


def show(
    model: Path, output: Path, *, t_low: float, t_high: float, seed: int, console: Console
) -> dict[Family, tuple[Trace, Grade]]:
    """All of it; trace and grade by family.

    Raises:
        ValueError: temperatures out of range, or `output` is no folder.
        OSError: no model there, or its training.json is missing.
    """
    ReSETConfig(t_low=t_low, t_high=t_high, tau_0=0.0)  # a bad temperature is told at once
    if not output.is_dir():
        raise ValueError(f"{output}: is no folder; create it")
    facts = read_trained(model)
    engine = load_engine(str(model), dtype="float32")
    held_out = [
        problem
        for family in FAMILIES
        for problem in make_problems(
            family, "calibration", _CALIBRATION_PROBLEMS, difficulty=facts.difficulty
        )
    ]
    tau_0 = find_tau_0(engine, held_out, min(facts.max_tokens, _CALIBRATION_TOKENS))
    config = ReSETConfig(t_low=t_low, t_high=t_high, tau_0=tau_0)
    told = f"{model}: {engine.quantisation['format']}; {len(held_out)} calibration problems give"
    console.print(f"{told}\n{config}", style="dim", highlight=False, soft_wrap=True)
    found: dict[Family, tuple[Trace, Grade]] = {}
    for family in FAMILIES:
        (problem,) = make_problems(family, "evaluation", 1, difficulty=facts.difficulty)
        found[family] = solve(engine, problem, config, facts.max_tokens, seed, console)
        page = write_page(found[family][0], output / f"pocket-{family}.html")
        console.print(f"trace page: {page}", highlight=False, soft_wrap=True)
    table = Table("problem", "checker", "tokens", "steps", "share at T_high", "mean entropy")
    for family, (trace, verdict) in found.items():
        figures = trace.summary()
        table.add_row(
            family,
            "right" if verdict.correct else "wrong",
            str(figures["tokens"]),
            str(figures["steps"]),
            f"{figures['share_t_high']:.0%}",
            f"{figures['mean_entropy_nats']:.3f} nats",
        )
    console.print()
    console.print(table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="model folder, NVFP4 or not")
    parser.add_argument("--output", type=Path, required=True, help="folder for the trace pages")
    parser.add_argument("--t-low", type=float, default=0.1)
    parser.add_argument("--t-high", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    temperatures = {"t_low": given.t_low, "t_high": given.t_high}
    try:
        show(given.model, given.output, **temperatures, seed=given.seed, console=Console())
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
