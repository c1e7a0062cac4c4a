"""How hard problems are, as flags: `--chain-steps 2 8` and the like, a flag for every field."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace

from lab.pocket_reasoner.problems import TRAINING, Difficulty


def difficulty_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of both families; what is left out stays as it was."""
    group = parser.add_argument_group("difficulty")
    group.add_argument("--chain-share", type=float)
    for family in ("chain", "search"):
        for name, value in asdict(getattr(TRAINING, family)).items():
            flag = f"--{family}-{name}"
            if isinstance(value, tuple):
                kind = type(value[0])
                group.add_argument(flag, type=kind, nargs=2, metavar=("LEAST", "MOST"))
            else:
                group.add_argument(flag, type=type(value))


def difficulty_of(arguments: argparse.Namespace, base: Difficulty) -> Difficulty:
    """`base` with what the flags say in place of its own.

    Raises:
        ValueError: a value is out of range.
    """
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    changed = base
    if "chain_share" in given:
        changed = replace(changed, chain_share=given["chain_share"])
    for family in ("chain", "search"):
        part = getattr(changed, family)
        values = {
            name: tuple(value) if isinstance(value, list) else value
            for name in asdict(part)
            if (value := given.get(f"{family}_{name}")) is not None
        }
        changed = replace(changed, **{family: replace(part, **values)})
    return changed
