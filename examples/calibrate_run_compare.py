# %% [markdown]
# # Calibrate, run, compare
#
# From a checkpoint to a comparison in two minutes on two CPU cores:
#
#     OMP_NUM_THREADS=1 python examples/calibrate_run_compare.py --model .cache/smollm2-135m
#
# The cells also open as a notebook (jupytext). Every step is what a command does: reset-calibrate
# --search, reset-run, reset-run compare. SmolLM2-135M is too small, and these problems far too few,
# to say anything about a method: what can be seen is that the tools say so.

# %%
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from reset import ReSETConfig
from reset.calibrate import text_sha256
from reset.evaluate.compare import compare, read_run
from reset.evaluate.engines.hf import TransformersEngine
from reset.evaluate.graders import Grader
from reset.evaluate.held_out import held_out_task
from reset.evaluate.runner import RunPlan, run
from reset.evaluate.search import search, search_arms, with_recommendation
from reset.evaluate.tasks import load_task
from reset.evaluate.threshold import find_threshold
from reset.presets import read_entry, used_problems
from reset.texts import read_problems

parser = argparse.ArgumentParser(description="Calibrate, run and compare a small model.")
parser.add_argument("--model", default=".cache/smollm2-135m", help="folder or hub name")
parser.add_argument("--work", type=Path, default=Path(".cache/compare"), help="folder to fill")
parser.add_argument("--problems", type=int, default=4, help="of the search, and of each run")
parser.add_argument("--max-tokens", type=int, default=28, help="output limit of an answer")
in_notebook = "ipykernel" in sys.modules
arguments = parser.parse_args([] if in_notebook else None)
work: Path = arguments.work
work.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## Problems
#
# Some for the calibration, others for the score. A parameter that was chosen on the problems of an
# evaluation flatters its score, so the calibration remembers a checksum of every problem it saw.


# %%
def sums(path: Path, first: int) -> Path:
    """A file of sums that begin with `first`, `first` + 1, ..."""
    pairs = [(first + number, 2 + number % 5) for number in range(arguments.problems + 3)]
    rows = [{"problem": f"What is {one} + {two}?", "answer": one + two} for one, two in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


calibration_data = sums(work / "calibration.jsonl", 3)
evaluation_data = sums(work / "evaluation.jsonl", 40)
engine = TransformersEngine(arguments.model)

# %% [markdown]
# ## tau_0
#
# The model decodes a few problems; tau_0 is the 80th percentile of the entropies of its own tokens.
# The interval says how far other problems might have moved it.

# %%
first_problems = read_problems(str(calibration_data), 3)
calibration = find_threshold(
    engine, first_problems, data=str(calibration_data), max_tokens=arguments.max_tokens
)
ends = calibration.tau_0_interval
assert ends is not None
print(f"tau_0 {calibration.config['tau_0']:.3f} nats, {ends['low']:.3f} .. {ends['high']:.3f}")

# %% [markdown]
# ## T_low and T_high
#
# A grid of ReSET settings, here of one, beside greedy and three fixed temperatures: the same
# problems, the same seeds. It ends in a recommendation, or in "no difference shown".

# %%
held_out = held_out_task(
    str(calibration_data),
    arguments.problems,
    max_tokens=arguments.max_tokens,
    apart_from=calibration.problems,
)
arms = search_arms(calibration.config["tau_0"], t_lows=[0.1], t_highs=[0.6])
plan = RunPlan(held_out, arms["greedy"], n_samples=1)
with Grader() as grader:
    done = search(arms, plan, engine, grader.grade, work / "search", resume=True)
calibration = with_recommendation(calibration, done, plan, "search", engine)
calibration.write(work / "calibration.json")
for arm in done:
    assert arm.report is not None, arm.refused
    print(f"{arm.name:<14} {arm.report.score.mean:6.1%} {arm.report.tokens_per_answer:5.0f} tokens")
print(calibration.recommendation)

# %% [markdown]
# ## Two runs
#
# On problems that the calibration has not seen: a fixed temperature, and the best of the grid. The
# answers are kept one by one; a run that was stopped goes on where it was.

# %%
evaluation = load_task("jsonl", [evaluation_data], max_problems=arguments.problems, ids="content")
seen = used_problems(read_entry(work / "calibration.json"))
assert not seen & {text_sha256(problem.question) for problem in evaluation.problems}
assert calibration.search is not None
policies = {
    "fixed": ReSETConfig(policy="fixed", base_temp=0.6),
    "reset": arms[calibration.search["best_reset"]],
}
with Grader() as grader:
    for name, config in policies.items():
        one = RunPlan(evaluation, config, n_samples=1, max_tokens=arguments.max_tokens)
        run(one, engine, grader.grade, work / name, resume=True)

# %% [markdown]
# ## The comparison
#
# Problem by problem. A difference is shown only if chance is an unlikely reason for it.

# %%
comparison = compare([read_run(work / name) for name in policies])
for line in comparison.lines:
    score = f"{line.score.mean:6.1%} ({line.score.low:.1%} .. {line.score.high:.1%})"
    print(f"{line.name:<6} {score}  {line.verdict}")
for remark in comparison.remarks:
    print(remark)
