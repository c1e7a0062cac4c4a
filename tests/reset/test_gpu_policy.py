"""On a CUDA GPU: detector, policy and scaling give what the CPU gives, without waiting for it.

make test-gpu
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from reset import ReSETConfig, StepDetector, TemperaturePolicy, scale_logits
from reset.config import ESTIMATORS, POLICIES
from tests.reset.test_policy import random_traces

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
PIECES = ["a", "b", "\n", ".\n\n", "\n\n", "c\n", "\nd", " ", *"efghijklmnop"]
CONFIG = ReSETConfig(t_low=0.1, tau_0=1.5, window=8)


@contextmanager
def no_waiting():
    """Any operation in the block that makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Decoding:
    """One batch in decoding: what an adapter does between the logits and the draw."""

    def __init__(self, config: ReSETConfig, requests: int, device: str) -> None:
        self.detector = StepDetector.from_pieces(PIECES).to(device)
        self.policy = TemperaturePolicy(config, slots=requests, device=device)
        self.state = self.detector.initial_state(requests)

    def step(self, logits: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """Scales `logits` [B, V] in place after `token` [B] was drawn; temperatures [B]."""
        state, new_step = self.detector.advance(self.state, token)
        self.state.copy_(state)
        return scale_logits(logits, self.policy, new_step).temperature

    def restart(self) -> None:
        self.policy.reset()
        self.state.zero_()


def random_decoding(tokens: int, requests: int, vocabulary: int, seed: int):
    """Logits [T, B, V], a third of the rows sharp and some entries masked, and tokens [T, B]."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(tokens, requests, 1, generator=generator) ** 2 * 12
    logits = torch.randn(tokens, requests, vocabulary, generator=generator) * spread
    logits[..., 5::7] = -torch.inf
    drawn = torch.randint(0, len(PIECES), (tokens, requests), generator=generator)
    return logits, drawn


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_decisions_equal_those_of_the_cpu(policy, estimator):
    config = ReSETConfig(t_low=0.2, tau_0=0.4, window=7, policy=policy, estimator=estimator)
    entropies, new_steps = random_traces(tokens=300, requests=64, seed=3)
    one, other = (TemperaturePolicy(config, slots=64, device=name) for name in ("cpu", DEVICE))
    for entropy, new_step in zip(entropies, new_steps, strict=True):
        expected = one.decide(entropy, new_step)
        decision = other.decide(entropy.to(DEVICE), new_step.to(DEVICE))
        assert torch.equal(decision.temperature.cpu(), expected.temperature)
        for got, wanted in zip(decision, expected, strict=True):
            torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=1e-12, equal_nan=True)


def test_slots_equal_those_of_the_cpu():
    """Rows that come and go in another order, as in an engine's batch."""
    generator = torch.Generator().manual_seed(4)
    one, other = (TemperaturePolicy(CONFIG, slots=16, device=name) for name in ("cpu", DEVICE))
    for _ in range(200):
        count = int(torch.randint(1, 17, (), generator=generator))
        slots = torch.randperm(16, generator=generator)[:count]
        entropy = torch.rand(count, generator=generator) * 3
        new_step = torch.rand(count, generator=generator) < 0.05
        expected = one.step(entropy, new_step, slots)
        got = other.step(entropy.to(DEVICE), new_step.to(DEVICE), slots.to(DEVICE))
        assert torch.equal(got.cpu(), expected)


def test_detector_equals_that_of_the_cpu():
    _, tokens = random_decoding(400, 32, 8, seed=5)
    one, other = (StepDetector.from_pieces(PIECES).to(name) for name in ("cpu", DEVICE))
    state, device_state = one.initial_state(32), other.initial_state(32)
    ends = 0
    for token in tokens:
        state, ended = one.advance(state, token)
        device_state, device_ended = other.advance(device_state, token.to(DEVICE))
        assert torch.equal(device_state.cpu(), state)
        assert torch.equal(device_ended.cpu(), ended)
        ends += int(ended.sum())
    assert ends > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("t_low", [0.1, 0.0])
def test_scaled_logits_equal_those_of_the_cpu(dtype, t_low):
    """Temperatures are equal, so scaled logits are: a division in float32 rounds alike anywhere."""
    logits, tokens = random_decoding(150, 8, 1000, seed=6)
    config = ReSETConfig(t_low=t_low, tau_0=1.5, window=8)
    one, other = (Decoding(config, 8, name) for name in ("cpu", DEVICE))
    temperatures = []
    for row, token in zip(logits.to(dtype), tokens, strict=True):
        ours, theirs = row.clone(), row.to(DEVICE)
        expected = one.step(ours, token)
        assert torch.equal(other.step(theirs, token.to(DEVICE)).cpu(), expected)
        assert torch.equal(theirs.cpu(), ours)
        temperatures += expected.tolist()
    assert len(set(temperatures)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_waits_for_the_device(dtype):
    logits, tokens = random_decoding(20, 8, 1000, seed=7)
    logits, tokens = logits.to(DEVICE, dtype), tokens.to(DEVICE)
    decoding = Decoding(ReSETConfig(t_low=0.0, tau_0=1.5), 8, DEVICE)
    decoding.step(logits[0], tokens[0])  # the first call may load kernels
    with no_waiting():
        for row, token in zip(logits[1:], tokens[1:], strict=True):
            decoding.step(row, token)
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting():
        logits[0, 0, 0].item()  # the mode does notice


def test_a_captured_step_replays_as_it_runs():
    logits, tokens = random_decoding(100, 8, 1000, seed=8)
    logits, tokens = logits.to(DEVICE), tokens.to(DEVICE)
    decoding, reference = (Decoding(CONFIG, 8, DEVICE) for _ in range(2))
    row, token = logits[0].clone(), tokens[0].clone()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            decoding.step(row, token)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        temperature = decoding.step(row, token)
    decoding.restart()

    seen = set()
    for new_row, new_token in zip(logits, tokens, strict=True):
        row.copy_(new_row)
        token.copy_(new_token)
        graph.replay()
        eager = new_row.clone()
        expected = reference.step(eager, new_token)
        assert torch.equal(temperature, expected)
        assert torch.equal(row, eager)
        seen |= set(expected.tolist())
    assert len(seen) == 2
