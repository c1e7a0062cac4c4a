"""`reset-run check`: does sampled text hold together to its end, before anything is scored?"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from nvfp4r.console import EXIT_PROBLEM, error_boundary, notes, output
from reset.cli import engines, options
from reset.cli.run_tables import answer_progress, soundness_table
from reset.config import ReSETConfig
from reset.evaluate.engines import Engine, Request
from reset.evaluate.problems import Answer
from reset.evaluate.runner import request_seed
from reset.evaluate.soundness import LONG, soundness
from reset.texts import read_problems

ARMS = {"greedy": 0.0, "fixed-0.7": 0.7, "fixed-1": 1.0}


def check(
    model: options.Model,
    data: Annotated[
        str, typer.Option(help="Questions, without answers: .jsonl, .txt, or a hub data set.")
    ] = "AI-MO/NuminaMath-1.5",
    num_problems: Annotated[int, typer.Option(help="Questions, each asked in every arm.")] = 4,
    max_tokens: Annotated[
        int, typer.Option(help="Output limit of an answer; short ones hide a slow collapse.")
    ] = 1200,
    engine: engines.EngineName = "hf",
    preset: options.Preset = None,
    top_p: options.TopP = 0.95,
    seed: Annotated[int, typer.Option(help="Of every answer, with its question's text.")] = 0,
    backend: engines.Backend = "auto",
    thinking: engines.Thinking = None,
    device: engines.Device = None,
    dtype: options.Dtype = "auto",
    activations: options.Activations = "checkpoint",
    tp: engines.TensorParallel = 1,
    concurrency: engines.Concurrency = 8,
    timeout: engines.Timeout = 3600.0,
    retries: engines.Retries = 5,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers and all texts as JSON.")
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Look for repetition, loops and words that are none, greedy and sampled at 0.7 and 1.0.

    A damaged checkpoint can be fluent when greedy and for a few tokens, and fall apart slowly when
    sampled. With --preset its policy is a fourth arm. Exit code 1 if an arm has a fault.
    """
    with error_boundary(debug):
        arms = {name: ReSETConfig(policy="fixed", base_temp=value) for name, value in ARMS.items()}
        if preset is not None:
            arms["preset"] = options.preset_config(preset)
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
        options.check_sampling(max_tokens, top_p, seed)
        questions = read_problems(data, num_problems)
        source = engines.open_engine(choice)
        answers = {}
        for name, config in arms.items():
            requests = [
                Request((("user", text),), request_seed(seed, text), config, max_tokens, top_p)
                for text in questions
            ]
            answers[name] = _decode(name, source, requests)
        found = {
            name: soundness(
                said, is_greedy=arms[name].policy == "fixed" and arms[name].may_be_greedy
            )
            for name, said in answers.items()
        }
        if as_json:
            plain = {
                name: {**asdict(one), "texts": [answer.text for answer in answers[name]]}
                for name, one in found.items()
            }
            print(json.dumps(plain, indent=2))
        else:
            output().print(soundness_table(found))
    short = [name for name, one in found.items() if not one.is_long]
    if short:
        notes().print(
            f"{', '.join(short)}: answers are shorter than {LONG} tokens, so a slow collapse would "
            "not show; ask for longer ones"
        )
    if any(one.faults for one in found.values()):
        raise typer.Exit(EXIT_PROBLEM)


def _decode(name: str, engine: Engine, requests: list[Request]) -> list[Answer]:
    found: dict[int, Answer] = {}
    tokens = 0
    with answer_progress(name) as advance:
        advance(0, len(requests), 0)
        for position, answer in engine.generate(requests):
            found[position] = answer
            tokens += answer.tokens
            advance(len(found), len(requests), tokens)
    return [found[position] for position in range(len(requests))]
