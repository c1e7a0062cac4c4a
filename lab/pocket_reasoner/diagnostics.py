"""What quantisation does to the model's entropies, by `reset.analyze`: dumps, studies, figures.

The BF16 model decodes evaluation problems once, all in one batch; every form, BF16 included, then
scores those tokens, an answer in one forward pass. Knows no accuracy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from lab.pocket_reasoner.arithmetic import Chain
from lab.pocket_reasoner.decode import BatchEngine, load_model
from lab.pocket_reasoner.search import Search
from reset.analyze.collect import Given, dump_given
from reset.analyze.dump import Dump
from reset.analyze.figures import write_figures
from reset.analyze.shift import shift
from reset.analyze.steps import step_entropies
from reset.analyze.study import Study
from reset.config import ReSETConfig
from reset.engine import DtypeName, Engine, is_nvfp4
from reset.evaluate.engines import Request
from reset.evaluate.engines.chat import prompt_ids

_POLICY = ReSETConfig(policy="fixed", base_temp=0.6)
_TOP_P = 0.95


def diagnose(
    models: Mapping[str, Path],
    problems: Sequence[Chain | Search],
    output: Path,
    *,
    max_tokens: int,
    tau_0: Mapping[str, float],
    device: str,
    dtype: DtypeName,
    graphs: bool,
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
        device, dtype, graphs: as `BatchEngine.load`.
        figures: draw the studies, which needs matplotlib.
        progress: called with what is done, answers done and answers in all.

    Returns:
        "answers"; "shift": by form, the rows of its groups by the mean of both models; "steps": by
        model, the summary of its steps.
    """
    shifts: dict[str, list[dict[str, Any]]] = {}
    steps: dict[str, Any] = {}
    reference: Dump | None = None
    given: Given | None = None
    for name, folder in models.items():
        engine = _load(folder, device, dtype)

        def advance(done: int, name: str = name) -> None:
            progress(f"entropies of {name}", done, len(problems))

        if given is None:
            given = _decoded(engine, problems, max_tokens, graphs)
        found = dump_given(engine, output / f"dump-{name}", given, None, advance=advance)
        if reference is None:
            reference = found
        else:
            study = shift(reference, found)
            _write(study, output / f"shift-{name}", figures)
            shifts[name] = [
                dict(row) for row in study.tables["groups"] if row["grouped_by"] == "mean"
            ]
        study = step_entropies(found, tau_0[name])
        _write(study, output / f"steps-{name}", figures)
        steps[name] = dict(study.summary)
    return {"answers": len(problems), "shift": shifts, "steps": steps}


def _load(folder: Path, device: str, dtype: DtypeName) -> Engine:
    """A form with the arithmetic that it is decoded with: NVFP4 layers stay unpacked."""
    quantisation = {"format": "NVFP4, dequantised" if is_nvfp4(folder) else "none"}
    model = load_model(folder, device, getattr(torch, dtype))
    return Engine(folder.name, folder, quantisation, model, AutoTokenizer.from_pretrained(folder))


def _decoded(
    engine: Engine, problems: Sequence[Chain | Search], max_tokens: int, graphs: bool
) -> Given:
    """An answer of the model to each problem, with its prompt; the same for the same model."""
    batch = BatchEngine(engine.model, engine.tokenizer, rows=len(problems), graphs=graphs)
    requests = [
        Request((("user", problem.question),), number, _POLICY, max_tokens, _TOP_P)
        for number, problem in enumerate(problems)
    ]
    prompts = [prompt_ids(engine.tokenizer, batch.render(request)) for request in requests]
    answers = dict(batch.decode(requests))
    sequences = [(ids, list(answers[number].ids)) for number, ids in enumerate(prompts)]
    names = [hashlib.sha256(json.dumps(one).encode()).hexdigest() for one in sequences]
    source = f"evaluation problems, answered at T = {_POLICY.base_temp}"
    return Given(source, names, sequences.__getitem__)


def _write(study: Study, prefix: Path, figures: bool) -> None:
    study.write(prefix)
    if figures:
        write_figures(study, prefix)
