"""Toy models: one with random weights and sharp logits, and one that was trained for seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lab.pocket_reasoner.arithmetic import ChainDifficulty
from lab.pocket_reasoner.model import Sizes, new_model, save_model
from lab.pocket_reasoner.problems import Difficulty
from lab.pocket_reasoner.search import SearchDifficulty
from lab.pocket_reasoner.tokenizer import IDS
from lab.pocket_reasoner.train import Training, train
from transformers import AutoModelForCausalLM

TOY_SIZES = Sizes(hidden=64, intermediate=96, layers=2, heads=4, key_value_heads=2, head_dim=16)


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory) -> Path:
    """A model folder. Its logits spread enough for entropies of all sizes."""
    model = new_model(TOY_SIZES, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(1 + torch.rand(parameter.shape))
            elif "embed" in name:  # tied: the output head as well
                parameter.mul_(10)
                parameter[IDS["\n\n"]].mul_(2.5)  # steps are to end now and then
            else:  # or it would say the last token again and again
                parameter.mul_(12)
    folder = tmp_path_factory.mktemp("toy") / "model"
    save_model(model, folder)
    return folder


@pytest.fixture(scope="session")
def toy_model(toy_folder) -> Any:
    return AutoModelForCausalLM.from_pretrained(toy_folder, dtype=torch.float32).eval()


SIZES = Sizes(hidden=64, intermediate=128, layers=2, heads=2, key_value_heads=1, head_dim=32)
EASY = Difficulty(
    chain=ChainDifficulty(steps=(1, 1), digits=(1, 1)),
    search=SearchDifficulty(numbers=(3, 3), insight=1.0),
    chain_share=0.9,
)
PLAN = Training(
    minutes=1.0,
    steps=120,
    rows=8,
    length=128,
    warmup=10,
    learning_rate=5e-3,
    evaluations=2,
    problems=2,
    max_tokens=60,
)


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A model folder made by the training script, and what that measured."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    return folder, train(PLAN, SIZES, EASY, folder)
