"""scale_logits and apply_temperature: scaling, exact argmax, masks, half precision."""

import math

import pytest
import torch

from reset import ReSETConfig, TemperaturePolicy, scale_logits
from reset.sampler import apply_temperature

INF = math.inf
NO = torch.zeros(1, dtype=torch.bool)


def policy(**values) -> TemperaturePolicy:
    return TemperaturePolicy(ReSETConfig(**{"t_low": 0.1, "tau_0": 0.5, **values}), slots=1)


def test_rows_are_divided_in_place_by_their_temperature():
    logits = torch.tensor([[2.0, 0.0, -1.0], [9.0, 0.0, -INF]])
    before = logits.clone()
    decision = scale_logits(
        logits, TemperaturePolicy(ReSETConfig(t_low=0.1, tau_0=0.5), 2), NO.repeat(2)
    )
    assert decision.temperature.tolist() == pytest.approx([1.0, 0.1])
    assert torch.equal(logits, before / decision.temperature[:, None])


def test_e2_one_candidate_of_a_large_vocabulary():
    logits = torch.full((1, 151_936), -INF)
    logits[0, 77] = 3.0
    decision = scale_logits(logits, policy(), NO)
    assert decision.temperature.item() == pytest.approx(0.1)
    assert logits[0, 77].item() == pytest.approx(30.0)  # the caller's tensor is the one changed
    assert logits.isfinite().sum().item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_e3_a_tiny_temperature_does_not_overflow(dtype):
    logits = torch.tensor([[11.0625, 11.0, 0.0, -INF]], dtype=dtype)
    apply_temperature(logits, torch.tensor([1e-5]))
    assert logits[0, :3].isfinite().all()
    assert logits[0, 3] == -INF
    assert torch.softmax(logits.float(), dim=1)[0, 0] == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-6])
def test_e3_temperature_zero_is_argmax_and_ties_keep_the_lowest_id(dtype, temperature):
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0], [5.0, 1.0, 1.0, 5.0]], dtype=dtype)
    apply_temperature(logits, torch.tensor([temperature, temperature]))
    probabilities = torch.softmax(logits.float(), dim=1)
    assert probabilities.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize(
    "values", [{"t_low": 0.0, "t_high": 0.0}, {"policy": "fixed", "base_temp": 0.0}], ids=str
)
def test_e6_temperature_zero_never_samples(values):
    for _ in range(10):
        logits = torch.tensor([[0.5, -1.2, 3.1, 0.8, -0.3, 2.7, -0.9, 1.4]])
        scale_logits(logits, policy(**values), NO)
        assert torch.multinomial(torch.softmax(logits, dim=1), 1).item() == 2


def test_greedy_rows_leave_their_neighbours_alone():
    logits = torch.randn(3, 9)
    before = logits.clone()
    apply_temperature(logits, torch.tensor([0.5, 0.0, 2.0]))
    assert torch.equal(logits[[0, 2]], before[[0, 2]] / torch.tensor([[0.5], [2.0]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_the_distribution(dtype):
    """The shift by the row's maximum cancels in softmax; bound: one rounding to the format of
    values up to 16 / 0.5 = 32, half an ulp: 2^-6 (float16) or 2^-3 (bfloat16) in a logit."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.rand(4, 100, generator=generator) * 16).to(dtype)
    exact = torch.log_softmax(logits.double() / 0.5, dim=1)
    apply_temperature(logits, torch.full((4,), 0.5))
    error = (torch.log_softmax(logits.double(), dim=1) - exact).abs().max().item()
    assert error <= 2 * {torch.float16: 2**-6, torch.bfloat16: 2**-3}[dtype]


def test_e4_nan_logits_stay_nan():
    logits = torch.tensor([[math.nan, 1.0], [1.0, 2.0]])
    decision = scale_logits(
        logits, TemperaturePolicy(ReSETConfig(t_low=0.0, tau_0=0.5), 2), NO.repeat(2)
    )
    assert decision.temperature.isnan().tolist() == [True, False]
    assert logits[0].isnan().all()


def test_double_scaling_cannot_come_from_here():
    """L9's numbers: logits [2, 0] in a high-entropy step are divided by T_high only."""
    logits = torch.tensor([[2.0, 0.0]])
    scale_logits(logits, policy(tau_0=0.1, t_high=0.5), NO)
    assert logits.tolist() == [[4.0, 0.0]]


def test_shape_is_checked_before_anything_is_written():
    state = policy()
    with pytest.raises(ValueError, match=r"\[B, V\] is needed"):
        scale_logits(torch.zeros(5), state, NO)
    assert state.state.eq(0).all()
