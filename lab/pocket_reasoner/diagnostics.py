"""What quantisation does to the model's entropies, by `reset.analyze`: dumps, studies, figures.

The BF16 model decodes evaluation problems once; every form then scores the very same tokens. Knows
no accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.pocket_reasoner.arithmetic import Chain
from lab.pocket_reasoner.search import Search
from reset.analyze.collect import Sampling, dump_answers, dump_given, sequences_of_dump
from reset.analyze.dump import Dump
from reset.analyze.figures import write_figures
from reset.analyze.shift import shift
from reset.analyze.steps import step_entropies
from reset.analyze.study import Study
from reset.config import ReSETConfig
from reset.engine import DtypeName, load_engine

_BATCH = 64
_POLICY = ReSETConfig(policy="fixed", base_temp=0.6)


def diagnose(
    models: Mapping[str, Path],
    problems: Sequence[Chain | Search],
    output: Path,
    *,
    max_tokens: int,
    tau_0: Mapping[str, float],
    device: str,
    dtype: DtypeName,
    figures: bool,
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """Dump, compare, write studies and figures into the folder `output`.

    Args:
        models: folders by name; the first decodes, the others are its quantised forms.
        problems: to decode.
        output: an existing folder.
        max_tokens: of an answer.
        tau_0: of each model, nats, drawn into the figures of steps.
        device, dtype: as `reset.engine.load_engine`.
        figures: draw the studies, which needs matplotlib.
        progress: called with what is done, answers done and answers in all.

    Returns:
        "answers"; "shift": by form, the rows of its groups by the mean of both models; "steps": by
        model, the summary of its steps.
    """
    shifts: dict[str, list[dict[str, Any]]] = {}
    steps: dict[str, Any] = {}
    reference: Dump | None = None
    for name, folder in models.items():
        engine = load_engine(str(folder), device=device, dtype=dtype)
        target = output / f"dump-{name}"

        def advance(done: int, name: str = name) -> None:
            progress(f"entropies of {name}", done, len(problems))

        if reference is None:
            sampling = Sampling(_POLICY, max_tokens, 0.95, 0, _BATCH)
            questions = [problem.question for problem in problems]
            found = dump_answers(
                engine, target, questions, sampling, data="evaluation problems", advance=advance
            )
            reference = found
        else:
            given = sequences_of_dump(engine, reference.folder, None)
            found = dump_given(engine, target, given, None, advance=advance)
            study = shift(reference, found)
            _write(study, output / f"shift-{name}", figures)
            shifts[name] = [
                dict(row) for row in study.tables["groups"] if row["grouped_by"] == "mean"
            ]
        study = step_entropies(found, tau_0[name])
        _write(study, output / f"steps-{name}", figures)
        steps[name] = dict(study.summary)
    return {"answers": len(problems), "shift": shifts, "steps": steps}


def _write(study: Study, prefix: Path, figures: bool) -> None:
    study.write(prefix)
    if figures:
        write_figures(study, prefix)
