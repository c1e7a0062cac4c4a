"""Greedy accuracy of a model that is in memory; the study has everything else."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from lab.pocket_reasoner.arithmetic import Chain
from lab.pocket_reasoner.decode import BatchEngine
from lab.pocket_reasoner.grading import as_task_problem, grade
from lab.pocket_reasoner.search import Search
from lab.pocket_reasoner.tokenizer import make_tokenizer
from reset.config import ReSETConfig
from reset.evaluate.engines import Request

GREEDY = ReSETConfig(policy="fixed", base_temp=0.0)


def greedy_accuracy(
    model: Any, problems: Sequence[Chain | Search], *, max_tokens: int, dtype: torch.dtype
) -> float:
    """Share of the problems that a copy of `model` in `dtype` solves, 0 .. 1."""
    asked = [as_task_problem(problem) for problem in problems]
    requests = [Request((("user", one.question),), 0, GREEDY, max_tokens) for one in asked]
    copied = copy.deepcopy(model).to(dtype).eval()
    engine = BatchEngine(copied, make_tokenizer(), rows=min(len(requests), 256))
    right = sum(grade(answer, asked[index]).correct for index, answer in engine.generate(requests))
    return right / len(requests)
