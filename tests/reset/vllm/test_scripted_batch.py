"""The same logits through transformers, V1 and V2: identical temperatures, whatever happens."""

from __future__ import annotations

import pytest
import torch

from reset.hf import ReSETLogitsProcessor
from tests.reset.vllm.runners import FakeV1, FakeV2
from tests.reset.vllm.world import DETECTOR, drive, make_scripts

SEEDS = range(6)


def by_transformers(script) -> list[float]:
    """Temperatures of the transformers adapter, which sees the request alone."""
    processor = ReSETLogitsProcessor(script.config, DETECTOR, record=True)
    for position, logits in enumerate(script.logits):
        processor(torch.tensor([[0, *script.tokens[:position]]]), logits.unsqueeze(0))
    return [float(p.decision.temperature) for p in processor._recorder._positions]


def check(runner, scripts) -> None:
    used = set()
    for name, script in scripts.items():
        if script.config is None:
            assert not runner.temperatures[name]
            continue
        got = [runner.temperatures[name][position] for position in range(len(script.tokens))]
        assert got == by_transformers(script)
        assert got == pytest.approx(script.expected())
        used |= set(got)
    assert len(used) >= 3  # low and high ones occurred


RUNNERS = {
    "v1": lambda scripts: FakeV1(scripts, is_async=False),
    "v1 async": lambda scripts: FakeV1(scripts, is_async=True),
    "v1 async, entry point": lambda scripts: FakeV1(scripts, is_async=True, is_repaired=False),
    "v2": FakeV2,
    "v2 drafts": lambda scripts: FakeV2(scripts, drafts=2),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", RUNNERS)
def test_l1_l2_l3_l4_l6_every_runner_gives_the_temperatures_of_a_request_alone(kind, seed):
    """Arrivals, prefill chunks, pauses, moves, swaps, preemptions, finishes, n = 4, drafts."""
    scripts = make_scripts(seed)
    runner = RUNNERS[kind](scripts)
    assert drive(runner, seed, drop_in_flight=kind != "v1") > 2
    check(runner, scripts)
    assert runner.losses() == 0
