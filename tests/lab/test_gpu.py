"""On a GPU: the captured step gives what the plain one gives, and training compiles."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from lab.pocket_reasoner.decode import BatchEngine
from lab.pocket_reasoner.quantised import quantise, write_texts
from lab.pocket_reasoner.train import train

from tests.lab.conftest import EASY, PLAN, SIZES
from tests.lab.test_decode import POLICIES, requests

pytestmark = pytest.mark.gpu

# Every policy at once, refilled again and again.
MIXED = [request for config in POLICIES.values() for request in requests(config)]


@pytest.fixture(scope="module", params=["plain", "w4a16", "w4a4"])
def folder(request, trained, tmp_path_factory):
    """The model that was trained for seconds, or a quantised form of it."""
    if request.param == "plain":
        return trained[0]
    made = tmp_path_factory.mktemp(request.param)
    write_texts(made / "texts.jsonl", 4, EASY)
    quantise(trained[0], made / "model", request.param, made / "texts.jsonl", "cuda")
    return made / "model"


def test_graphs_change_nothing(folder):
    found = []
    for graphs in (True, False):
        engine = BatchEngine.load(folder, rows=16, device="cuda", dtype="bfloat16", graphs=graphs)
        found.append(dict(engine.decode(MIXED)))
    assert found[0] == found[1]
    assert len(found[0]) == len(MIXED)


def test_the_answers_of_a_cpu(toy_folder):
    """In float32, where rounding decides few draws: nearly all of them are the same."""
    torch.set_float32_matmul_precision("highest")
    on_cpu, on_gpu = (
        dict(BatchEngine.load(toy_folder, rows=16, device=device).decode(MIXED))
        for device in ("cpu", "cuda")
    )
    same = sum(on_cpu[number].ids == on_gpu[number].ids for number in on_cpu)
    assert same >= 0.9 * len(MIXED)


def test_an_answer_does_not_depend_on_its_company(trained):
    engine = BatchEngine.load(trained[0], rows=16, device="cuda", dtype="bfloat16")
    together = dict(engine.decode(MIXED))
    for number in (0, 20, 41):
        assert dict(engine.decode([MIXED[number]])) == {0: together[number]}


def test_training_compiles_and_the_loss_falls(tmp_path):
    plan = replace(
        PLAN, minutes=3.0, steps=60, device="cuda", autocast=True, compiled=True, processes=2
    )
    facts = train(plan, SIZES, EASY, tmp_path / "model", figure=False)
    lines = (tmp_path / "model" / "learning_curve.jsonl").read_text().splitlines()
    losses = [point["loss"] for point in map(json.loads, lines) if "loss" in point]
    assert facts["steps"] == 60
    assert losses[-1] < 0.5 * losses[0]
