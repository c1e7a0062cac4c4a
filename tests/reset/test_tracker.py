"""RequestTracker in plain torch against the scalar program: calls as engines make them."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from reset import ReSETConfig, StepDetector, TemperaturePolicy, scale_logits
from reset.config import ESTIMATORS, POLICIES
from reset.tracker import RequestTracker
from tests.reset.engine_calls import Call, random_calls
from tests.reset.tracker_spec import PIECES, Slot

CONFIG = ReSETConfig(t_low=0.1, tau_0=0.5, window=3)
A, NEWLINE, BLANK = PIECES.index("a"), PIECES.index("\n"), PIECES.index("\n\n")


def tracker(slots: int = 4, **options) -> RequestTracker:
    return RequestTracker(StepDetector.from_pieces(PIECES), slots, device="cpu", **options)


def admitted(slots: list[int], configs: list[ReSETConfig], **options) -> RequestTracker:
    made = tracker(max(slots) + 2, **options)
    made.admit(slots, configs, [1.0] * len(slots))
    return made


def rows(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def entropies_like_models(rng: random.Random, count: int) -> list[float]:
    """float32 values, a third of them equal: exact ties must hold."""
    values = [0.0 if rng.random() < 0.3 else rng.random() ** 4 * 3 for _ in range(count)]
    return torch.tensor(values, dtype=torch.float32).tolist()


def assert_call_matches(made: RequestTracker, truth: dict[int, Slot], call: Call, rng) -> None:
    entropy = entropies_like_models(rng, len(call.slots))
    decision = made.decide(
        torch.tensor(entropy), rows(*call.slots), rows(*call.tokens), rows(*call.positions)
    )
    expected = [None] * len(call.slots)
    for slot, first, count in call.groups:
        part = slice(first, first + count)
        expected[part] = truth[slot].call(call.positions[first], entropy[part], call.tokens[part])
    wanted = torch.tensor([token.temperature if token else math.nan for token in expected])
    torch.testing.assert_close(decision.temperature, wanted, rtol=0, atol=0, equal_nan=True)
    for name in ("step_entropy", "mean_entropy", "threshold"):
        values = [getattr(token, name) if token else math.nan for token in expected]
        torch.testing.assert_close(
            getattr(decision, name),
            torch.tensor(values, dtype=torch.float64),
            rtol=0,
            atol=1e-5,
            equal_nan=True,
        )


def assert_summary_matches(made: RequestTracker, truth: dict[int, Slot]) -> None:
    summary = made.summary()
    for slot, one in truth.items():
        torch.testing.assert_close(
            summary[slot], torch.tensor(one.summary(), dtype=torch.float64), rtol=0, atol=1e-9
        )


@pytest.mark.parametrize("max_rows", [1, 2, 5])
def test_random_calls_of_an_engine_agree(max_rows):
    configs = {
        0: ReSETConfig(t_low=0.1, tau_0=0.55, window=8),
        3: ReSETConfig(t_low=0.2, tau_0=0.4, window=1, policy="relative"),
        4: ReSETConfig(t_low=0.3, tau_0=0.4, t_high=0.7, window=2, estimator="ema"),
        7: ReSETConfig(policy="fixed", base_temp=0.6, window=8),
    }
    made = admitted(list(configs), list(configs.values()), max_window=8, max_rows=max_rows)
    truth = {slot: Slot(config.to_dict()) for slot, config in configs.items()}
    rng = random.Random(max_rows)
    for call in random_calls(max_rows, 400, list(configs), max_rows):
        assert_call_matches(made, truth, call, rng)
        assert_summary_matches(made, truth)
    assert all(slot.lost > 3 and slot.after[0].steps > 10 for slot in truth.values())


@pytest.mark.parametrize(("policy", "estimator"), itertools.product(POLICIES, ESTIMATORS))
def test_every_policy_and_estimator_agrees_when_drafts_are_rejected(policy, estimator):
    config = ReSETConfig(t_low=0.2, tau_0=0.4, window=4, policy=policy, estimator=estimator)
    made = admitted([0, 1], [config, config], max_rows=3, max_window=4)
    truth = {slot: Slot(config.to_dict()) for slot in (0, 1)}
    rng = random.Random(5)
    for call in random_calls(7, 80, [0, 1], max_rows=3):
        assert_call_matches(made, truth, call, rng)


def test_one_token_at_a_time_it_is_detector_and_policy_bit_for_bit():
    detector = StepDetector.from_pieces(PIECES)
    requests, vocabulary = 5, 50
    policy = TemperaturePolicy(CONFIG, slots=requests)
    made = admitted(list(range(requests)), [CONFIG] * requests)
    state, new_step = detector.initial_state(requests), torch.zeros(requests, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    token = torch.zeros(requests, dtype=torch.int64)
    for position in range(200):
        spread = torch.rand(requests, 1, generator=generator) ** 2 * 12
        logits = torch.randn(requests, vocabulary, generator=generator) * spread
        ours, theirs = logits.clone(), logits.clone()
        if position > 0:
            state, new_step = detector.advance(state, token)
        expected = scale_logits(theirs, policy, new_step)
        decision = made.scale(
            ours, torch.arange(requests), token, torch.full((requests,), position)
        )
        assert all(torch.equal(a, b) for a, b in zip(decision, expected, strict=True))
        assert torch.equal(ours, theirs)
        token = torch.randint(0, len(PIECES), (requests,), generator=generator)
    assert made.summary()[:requests, 1].min() > 10


def step(made: RequestTracker, slot: int, position: int, entropy: float, token: int = A):
    decision = made.decide(torch.tensor([entropy]), rows(slot), rows(token), rows(position))
    return decision.mean_entropy.item()


def test_l1_chunks_of_a_prefill_change_nothing():
    """Each chunk yields a row at position 0; only the last one's entropy is of the request."""
    made = admitted([0], [CONFIG])
    for entropy in (9.0, 8.0, 7.0, 1.0):
        step(made, 0, 0, entropy)
    assert step(made, 0, 1, 5.0) == 1.0
    assert made.summary()[0].tolist() == [1, 0, 1, 1.0, 0]


def test_a_position_computed_again_replaces_its_result():
    made = admitted([0], [CONFIG])
    for position, entropy in enumerate([1.0, 2.0, 9.0]):
        step(made, 0, position, entropy)
    assert step(made, 0, 2, 3.0) == 1.5
    assert step(made, 0, 3, 0.0) == 2.0


def test_rejected_drafts_leave_no_trace_of_their_step_borders():
    made = admitted([0], [CONFIG], max_rows=3)
    made.decide(torch.tensor([1.0]), rows(0), rows(-1), rows(0))
    made.decide(torch.tensor([2.0, 8.0, 8.0]), rows(0, 0, 0), rows(A, BLANK, A), rows(1, 2, 3))
    assert step(made, 0, 2, 4.0) == 1.5  # only position 1 was kept
    assert step(made, 0, 3, 0.0) == pytest.approx(7 / 3)
    assert made.summary()[0, 1] == 0


def test_a_border_that_lies_between_two_drafts_is_seen():
    made = admitted([0], [CONFIG], max_rows=3)
    made.decide(torch.tensor([1.0]), rows(0), rows(-1), rows(0))
    made.decide(torch.ones(3), rows(0, 0, 0), rows(A, NEWLINE, NEWLINE), rows(1, 2, 3))
    step(made, 0, 4, 1.0)
    assert made.summary()[0].tolist() == [4, 1, 4, 4.0, 0]


def test_parked_and_brought_back_to_another_slot():
    """Preemption: the slot is given to another request, later the history comes back."""
    made = admitted([0, 1], [CONFIG, CONFIG], max_rows=2)
    truth = Slot(CONFIG.to_dict())
    made.release([1])
    for position, entropy in enumerate([0.5, 1.5, 0.25]):
        step(made, 0, position, entropy)
        truth.call(position, [entropy], [A])
    made.copy([0], [2])  # slot 2 is the park
    made.admit([0], [ReSETConfig(t_low=0.9, tau_0=0.1)], [1.0])
    step(made, 0, 0, 3.0)
    made.copy([2], [1])
    for position, entropy in enumerate([1.0, 0.5], start=3):
        wanted = truth.call(position, [entropy], [A])[0]
        assert step(made, 1, position, entropy) == pytest.approx(wanted.mean_entropy)
    assert made.summary()[1].tolist() == truth.summary()


def test_copies_happen_all_at_once():
    made = admitted([0, 1], [CONFIG, CONFIG])
    step(made, 0, 0, 1.0)
    step(made, 1, 0, 2.0)
    made.copy([0, 1], [1, 0])
    assert (step(made, 0, 1, 0.0), step(made, 1, 1, 0.0)) == (2.0, 1.0)


@pytest.mark.parametrize("jump", [7, 2, 0])
def test_a_position_that_does_not_fit_starts_afresh_and_is_counted(jump):
    made = admitted([0], [CONFIG])
    for position in range(5):
        step(made, 0, position, 1.0)
    assert step(made, 0, jump, 3.0) == 3.0  # as a first token: the mean of nothing is H_t
    assert step(made, 0, jump + 1, 0.0) == 3.0
    assert made.summary()[0].tolist() == [5, 0, 5, 7.0, 1]


@pytest.mark.parametrize(("outputs", "steps"), [([A, NEWLINE, NEWLINE], 1), ([A, NEWLINE], 0)])
def test_a_request_that_comes_with_outputs_counts_as_lost_and_keeps_its_border(outputs, steps):
    """The last output is fed again with the first row; two newlines at the gap end a step."""
    made = tracker()
    made.admit([1], [CONFIG], [1.0], outputs=[outputs])
    step(made, 1, len(outputs), 1.0, token=outputs[-1])
    step(made, 1, len(outputs) + 1, 1.0)
    assert made.summary()[1].tolist() == [1, steps, 1, 1.0, 1]


def test_without_its_outputs_the_loss_is_counted_once_as_well():
    made = admitted([1], [CONFIG])
    step(made, 1, 4, 1.0)
    step(made, 1, 5, 1.0)
    assert made.summary()[1].tolist() == [1, 0, 1, 1.0, 1]


def test_l9_the_requests_own_temperature_cancels():
    """Own temperature 0.5: after the engine's division the logits are those of T alone."""
    made = tracker()
    made.admit([0, 1, 2], [CONFIG] * 3, [1.0, 0.5, 0.1])
    logits = torch.tensor([[2.0, 0.0, -1.0]]).repeat(3, 1) * 4  # sharp: T_low
    before = logits.clone()
    decision = made.scale(logits, rows(0, 1, 2), rows(0, 0, 0), rows(0, 0, 0))
    assert decision.temperature.tolist() == pytest.approx([0.1] * 3)
    own = torch.tensor([[1.0], [0.5], [0.1]])
    assert torch.equal(logits, before / (torch.tensor(0.1) / own))
    assert torch.equal(logits[2], before[2])  # 0.1 / 0.1: not even a rounding
    torch.testing.assert_close(logits / own, before / 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_nobody_are_left_alone_bit_for_bit(dtype):
    made = admitted([0], [ReSETConfig(t_low=0.0, tau_0=0.5, t_high=0.0)])
    made.admit([1], [CONFIG], [1.0])
    made.release([1])
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    logits = torch.randn(5, 9).to(dtype)
    logits[1:, 0] = math.nan
    logits[1:, 1] = -math.inf
    logits.view(integers)[1:, 2] += 1  # other bits of NaN too
    before = logits.clone()
    decision = made.scale(logits, rows(0, -1, 0, 1, 1), rows(*[10**6] * 5), rows(0, 0, -1, 0, 1))
    assert torch.equal(logits.view(integers)[1:], before.view(integers)[1:])
    assert logits[0].isfinite().sum() == 1
    assert torch.stack([field.double() for field in decision])[:, 1:].isnan().all()


def test_e3_greedy_temperatures_mask_all_but_the_first_largest():
    made = admitted([0], [ReSETConfig(t_low=0.0, tau_0=9.0)])
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0]])
    made.scale(logits, rows(0), rows(0), rows(0))
    assert torch.softmax(logits, dim=1).tolist() == [[0, 1, 0, 0]]


def test_e4_nan_poisons_its_request_alone_until_it_is_admitted_anew():
    made = admitted([0, 1], [CONFIG, CONFIG])
    for position in range(20):
        logits = torch.zeros(2, 4)
        logits[0, 1] = math.nan if position == 1 else 0.0
        decision = made.scale(logits, rows(0, 1), rows(A, A), rows(position, position))
        assert decision.temperature.isnan().tolist() == [position > 0, False]
        assert logits.isnan().any(dim=1).tolist() == [position > 0, False]
    made.admit([0], [CONFIG], [1.0])
    assert not made.decide(torch.ones(1), rows(0), rows(A), rows(0)).temperature.isnan()


@pytest.mark.parametrize("token", [-1, len(PIECES), 10**9])
def test_l4_a_token_that_does_not_exist_is_never_a_silent_guess(token):
    """Async scheduling hands over -1 for a token that is still on the device."""
    made = admitted([0], [CONFIG])
    step(made, 0, 0, 1.0, token=token)  # ignored at position 0
    for position in (1, 2):
        logits = torch.zeros(1, 4)
        made.scale(logits, rows(0), rows(token if position == 1 else A), rows(position))
        assert logits.isnan().all()


def test_rows_beyond_the_limit_and_slots_that_do_not_exist_become_nan():
    made = admitted([0], [CONFIG], max_rows=2)
    logits = torch.zeros(4, 3)
    made.scale(logits, rows(0, 0, 0, 99), rows(A, A, A, A), rows(0, 1, 2, 0))
    assert logits.isnan().all(dim=1).tolist() == [False, False, True, True]
    assert step(made, 0, 2, 1.0) == pytest.approx(math.log(3))  # two rows were kept


def test_an_empty_batch_is_allowed():
    decision = tracker().scale(torch.zeros(0, 4), rows(), rows(), rows())
    assert [field.shape for field in decision] == [(0,)] * 5


def test_wrong_arguments_are_refused_before_anything_is_written():
    made = admitted([0], [CONFIG])
    before = made.summary().clone()
    logits, one = torch.zeros(1, 4), rows(0)
    with pytest.raises(ValueError, match=r"position is \(2,\)"):
        made.scale(logits, one, one, rows(0, 1))
    with pytest.raises(ValueError, match=r"slots is \(1,\) torch.int16"):
        made.scale(logits, one.to(torch.int16), one, one)
    with pytest.raises(TypeError, match=r"logits have dtype torch.float64"):
        made.scale(logits.double(), one, one, one)
    with pytest.raises(ValueError, match=r"logits have shape \(4,\)"):
        made.scale(logits[0], one, one, one)
    with pytest.raises(ValueError, match="token is on meta"):
        made.scale(logits, one, one.to("meta"), one)
    assert torch.equal(made.summary(), before)
    assert not logits.any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([4], [CONFIG], [1.0]), "slot 4 does not exist; they are 0 .. 3"),
        (([1, 1], [CONFIG] * 2, [1.0] * 2), "each slot may be named once"),
        (([1], [CONFIG], []), "1 slots, 1 configs, 0 temperatures"),
        (([1], [ReSETConfig(t_low=0.1, tau_0=1, window=33)], [1.0]), "max_window=33"),
        (([1], [CONFIG], [0.0]), "temperature is 0.0; it must be finite and > 0"),
        (([1], [CONFIG], [math.inf]), "temperature is inf"),
        (([1], [CONFIG], [1.0], [[0, -1]]), "output token -1 is not one of the detector's"),
    ],
    ids=str,
)
def test_admission_names_what_is_wrong(arguments, message):
    made = tracker()
    with pytest.raises(ValueError, match=message):
        made.admit(*arguments)
    assert not made.summary().any()


def test_copies_and_constructor_name_what_is_wrong():
    with pytest.raises(ValueError, match="2 source slots and 1 targets"):
        tracker().copy([0, 1], [2])
    with pytest.raises(ValueError, match=r"target is .* named once"):
        tracker().copy([0, 1], [2, 2])
    with pytest.raises(ValueError, match="source: slot -1 does not exist"):
        tracker().copy([-1], [2])
    with pytest.raises(ValueError, match="max_rows is 0"):
        tracker(max_rows=0)
    with pytest.raises(ValueError, match="backend is 'cuda'"):
        tracker(backend="cuda")
    assert tracker().backend == "torch"
