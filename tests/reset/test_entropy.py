"""entropy_nats against float64, and its defined edges (reports E1, E7, C1)."""

import math

import pytest
import torch

from reset import entropy_nats

INF = math.inf


def entropy_fp64(row: list[float]) -> float:
    """Scalar float64 truth; masked entries dropped."""
    kept = [value for value in row if value != -INF]
    top = max(kept)
    weights = [math.exp(value - top) for value in kept]
    total = math.fsum(weights)
    return -math.fsum(w / total * (math.log(w / total) if w else 0.0) for w in weights)


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        (torch.tensor([0.0, -INF]), 0.0),
        (torch.tensor([0.0, 0.0, -INF]), 0.693147),
        (torch.tensor([65504.0, -65504.0], dtype=torch.float16), 0.0),
        (torch.tensor([-INF, -INF]), 0.0),
        (torch.tensor([3.0]), 0.0),
    ],
)
def test_e1_masked_and_extreme_logits(logits, expected):
    assert entropy_nats(logits).item() == pytest.approx(expected, abs=1e-6)


def test_e7_the_unit_is_nats():
    assert entropy_nats(torch.zeros(1000)).item() == pytest.approx(6.9078, abs=5e-5)


def test_c1_raw_tempered_and_truncated_entropies_differ():
    logits = torch.tensor([2.0, 1.0, 0.0])
    truncated = torch.tensor([2.0, 1.0, -INF])
    assert entropy_nats(logits).item() == pytest.approx(0.8324, abs=5e-5)
    assert entropy_nats(logits / 0.6).item() == pytest.approx(0.5567, abs=5e-5)
    assert entropy_nats(truncated / 0.6).item() == pytest.approx(0.4378, abs=5e-5)


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_e4_nan_and_plus_inf_stay_visible_in_their_row(bad):
    logits = torch.randn(3, 50)
    logits[1, 7] = bad
    assert entropy_nats(logits).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_matches_float64_at_vocabulary_size(dtype, scale):
    """Bound: V additions in float32 by pairwise summation, relative error about log2(V) * 2^-24 =
    1e-6 in each of the two sums; H <= 12 nats, so 2.5e-5 absolute covers log and quotient."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(2, 151_936, generator=generator) * scale).to(dtype)
    logits[1, ::3] = -INF
    truth = [entropy_fp64(row) for row in logits.double().tolist()]
    assert entropy_nats(logits).tolist() == pytest.approx(truth, abs=2.5e-5)


def test_shape_and_dtype():
    logits = torch.randn(2, 3, 11, dtype=torch.bfloat16)
    entropy = entropy_nats(logits)
    assert entropy.shape == (2, 3)
    assert entropy.dtype == torch.float32


def test_wrong_input_is_refused():
    with pytest.raises(TypeError, match=r"torch\.int64"):
        entropy_nats(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\(2, 0\)"):
        entropy_nats(torch.zeros(2, 0))
