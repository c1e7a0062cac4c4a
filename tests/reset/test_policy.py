"""The batched policy against the scalar specification, and its slots."""

import itertools
import math

import pytest
import torch

from reset import ReSETConfig, TemperaturePolicy
from reset.config import ESTIMATORS, POLICIES
from tests.reset.spec import Request


def random_traces(tokens: int, requests: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Entropies as reasoning models have them: most near 0, a tail of uncertain ones."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.rand(tokens, requests, generator=generator) ** 4 * 3
    quiet = torch.rand(tokens, requests, generator=generator) < 0.3
    entropies = torch.where(quiet, 0.0, base)  # equal values on purpose: exact ties must hold
    new_step = torch.rand(tokens, requests, generator=generator) < 0.02
    new_step[0] = False
    return entropies, new_step


def assert_matches_spec(config: ReSETConfig, tokens: int, requests: int, seed: int) -> None:
    entropies, new_steps = random_traces(tokens, requests, seed)
    policy = TemperaturePolicy(config, slots=requests)
    truth = [Request(**config.to_dict()) for _ in range(requests)]
    for entropy, new_step in zip(entropies, new_steps, strict=True):
        decision = policy.decide(entropy, new_step)
        expected = [
            request.feed(h, new)
            for request, h, new in zip(truth, entropy.tolist(), new_step.tolist(), strict=True)
        ]
        temperatures = torch.tensor([token.temperature for token in expected])
        assert torch.equal(decision.temperature, temperatures)
        for name in ("step_entropy", "mean_entropy", "threshold"):
            wanted = torch.tensor([getattr(t, name) for t in expected], dtype=torch.float64)
            torch.testing.assert_close(
                getattr(decision, name), wanted, rtol=0, atol=1e-5, equal_nan=True
            )


def test_random_traces_of_2000_tokens_and_64_requests_agree():
    assert_matches_spec(ReSETConfig(t_low=0.1, tau_0=0.55), tokens=2000, requests=64, seed=0)


@pytest.mark.parametrize(("policy", "estimator"), itertools.product(POLICIES, ESTIMATORS))
@pytest.mark.parametrize("window", [1, 7, 32])
def test_every_policy_and_estimator_agrees(policy, estimator, window):
    config = ReSETConfig(t_low=0.2, tau_0=0.4, window=window, policy=policy, estimator=estimator)
    assert_matches_spec(config, tokens=200, requests=8, seed=window)


def test_the_first_step_is_always_confident():
    """H_step and H_bar are the same mean then; rounding must not tell them apart."""
    policy = TemperaturePolicy(ReSETConfig(t_low=0.1, tau_0=0.55), slots=16)
    generator = torch.Generator().manual_seed(1)
    for _ in range(500):
        entropy = torch.rand(16, generator=generator) * 3
        decision = policy.decide(entropy, torch.zeros(16, dtype=torch.bool))
        assert torch.equal(decision.step_entropy, decision.mean_entropy)


def test_s2_the_token_that_completes_the_delimiter_belongs_to_the_old_step():
    """Entropies 1, 1, (delimiter) 1, 5, 5: the new step's mean after two tokens is 5.0."""
    config = ReSETConfig(t_low=0.1, tau_0=0.5, window=2)
    policy = TemperaturePolicy(config, slots=1)
    for entropy, new_step in [(1.0, False), (1.0, False), (1.0, False), (5.0, True), (5.0, False)]:
        policy.step(torch.tensor([entropy]), torch.tensor([new_step]))
    decision = policy.decide(torch.tensor([0.0]), torch.tensor([False]))
    assert decision.step_entropy.item() == 5.0


def test_e4_the_first_token_is_compared_with_tau_0():
    policy = TemperaturePolicy(ReSETConfig(t_low=0.1, tau_0=0.5), slots=3)
    temperature = policy.step(torch.tensor([0.0, 0.4, 0.5]), torch.zeros(3, dtype=torch.bool))
    assert temperature.tolist() == pytest.approx([0.1, 0.1, 1.0])


@pytest.mark.parametrize("policy_name", POLICIES)
def test_e4_nan_poisons_its_request_alone_and_for_good(policy_name):
    config = ReSETConfig(t_low=0.1, tau_0=0.5, policy=policy_name)
    policy = TemperaturePolicy(config, slots=2)
    no = torch.zeros(2, dtype=torch.bool)
    policy.step(torch.tensor([0.2, 0.2]), no)
    assert policy.step(torch.tensor([math.nan, 0.2]), no).isnan().tolist() == [True, False]
    for _ in range(40):  # also when the window has forgotten the NaN
        later = policy.step(torch.tensor([0.2, 0.2]), no)
    assert later.isnan().tolist() == [True, False]
    policy.reset(torch.tensor([0]))
    assert not policy.step(torch.tensor([0.2, 0.2]), no).isnan().any()


def test_slots_keep_parameters_and_history_when_rows_move():
    """Two requests swap rows, then one leaves: each keeps its own numbers (as report L4 asks)."""
    first = ReSETConfig(t_low=0.1, tau_0=0.5)
    second = ReSETConfig(t_low=0.5, tau_0=0.7, t_high=0.7, window=3, policy="relative")
    policy = TemperaturePolicy(first, slots=5)
    policy.configure(second, slots=[4])
    truth = {2: Request(**first.to_dict()), 4: Request(**second.to_dict())}
    generator = torch.Generator().manual_seed(3)
    for order in [[2, 4]] * 5 + [[4, 2]] * 5 + [[4]] * 5 + [[2, 4]] * 5:
        entropy = torch.rand(len(order), generator=generator)
        new_step = torch.rand(len(order), generator=generator) < 0.2
        got = policy.step(entropy, new_step, torch.tensor(order))
        rows = zip(order, entropy.tolist(), new_step.tolist(), strict=True)
        wanted = [truth[slot].feed(h, new).temperature for slot, h, new in rows]
        assert torch.equal(got, torch.tensor(wanted))


def test_configure_forgets_the_history_of_those_slots_only():
    policy = TemperaturePolicy(ReSETConfig(t_low=0.1, tau_0=0.5), slots=2)
    no = torch.zeros(2, dtype=torch.bool)
    policy.step(torch.tensor([2.0, 2.0]), no)
    policy.configure(ReSETConfig(t_low=0.1, tau_0=0.5), slots=[0])
    decision = policy.decide(torch.tensor([1.0, 1.0]), no)
    assert decision.mean_entropy.tolist() == [1.0, 2.0]


def test_wrong_arguments_are_refused():
    policy = TemperaturePolicy(ReSETConfig(t_low=0.1, tau_0=0.5), slots=2)
    one, no = torch.zeros(1), torch.zeros(1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"new_step is \(2,\)"):
        policy.step(one, torch.zeros(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"new_step .* bool \[1\] is needed"):
        policy.step(one, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="slots"):
        policy.step(one, no, torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="3 rows, but this policy has 2 slots"):
        policy.step(torch.zeros(3), torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="max_window=64"):
        policy.configure(ReSETConfig(t_low=0.1, tau_0=0.5, window=64))
    with pytest.raises(ValueError, match="slot 2 does not exist"):
        policy.configure(ReSETConfig(t_low=0.1, tau_0=0.5), slots=[2])
    with pytest.raises(ValueError, match="entropy_nats is on meta"):
        policy.step(torch.zeros(1, device="meta"), no)
    assert policy.state.eq(0).all()
