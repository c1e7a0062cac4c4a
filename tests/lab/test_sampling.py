"""Random numbers against the published generator, draws against the distribution."""

from __future__ import annotations

import pytest
import torch
from lab.pocket_reasoner.sampling import draw, uniform
from transformers import TopPLogitsWarper

MASK = (1 << 64) - 1


def split_mix(state):
    """SplitMix64's output function, as published, on Python integers."""
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_uniform_is_split_mix_of_a_counter():
    golden = 0x9E3779B97F4A7C15
    seeds, counts = [0, 1, 7, 2**31 - 1], [0, 1, 500, 123_456]
    pairs = [(seed, count) for seed in seeds for count in counts]
    expected = [
        (split_mix((split_mix(seed * golden & MASK) + (count + 1) * golden) & MASK) >> 11) / 2**53
        for seed, count in pairs
    ]
    found = uniform(torch.tensor([p[0] for p in pairs]), torch.tensor([p[1] for p in pairs]))
    assert found.tolist() == expected


@pytest.mark.parametrize("along", ["seeds", "counts"])
def test_uniform_is_uniform_along_seeds_and_along_counts(along):
    many, zeros = torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64)
    found = uniform(many, zeros) if along == "seeds" else uniform(zeros, many)
    counts = torch.histc(found, bins=50, min=0, max=1)
    chi_squared = float(((counts - 2000) ** 2 / 2000).sum())
    assert 20 < chi_squared < 95  # 49 degrees of freedom: five deviations below and above
    assert abs(float(torch.corrcoef(torch.stack([found[1:], found[:-1]]))[0, 1])) < 0.015


def test_draws_have_the_probabilities_of_the_logits():
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0, -torch.inf])
    rows = 200_000
    chance = uniform(torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
    drawn = draw(logits.expand(rows, -1), torch.ones(rows), chance)
    frequency = torch.bincount(drawn, minlength=5) / rows
    probability = logits.softmax(0)
    deviation = (probability * (1 - probability) / rows).sqrt()
    assert ((frequency - probability).abs() <= 5 * deviation).all()
    assert frequency[4] == 0


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.8, 0.95, 1.0])
def test_the_nucleus_is_that_of_transformers(top_p):
    logits = torch.randn((40, 12), generator=torch.Generator().manual_seed(1)) * 2
    kept = TopPLogitsWarper(top_p=top_p)(None, logits) > -torch.inf
    chances = torch.linspace(0, 1, 4001, dtype=torch.float64)[:-1]
    for row, expected in zip(logits, kept, strict=True):
        drawn = draw(row.expand(4000, -1), torch.full((4000,), top_p), chances)
        seen = torch.zeros(12, dtype=torch.bool)
        seen[drawn] = True
        probability = row.softmax(0)[expected]
        assert not (seen & ~expected).any()
        assert seen.sum() >= (probability > 1 / 2000).sum()


def test_one_candidate_and_the_largest_chance():
    last = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    one_left = torch.full((1, 6), -torch.inf)
    one_left[0, 4] = 3.0
    assert draw(one_left, torch.tensor([0.95]), last).tolist() == [4]
    assert draw(torch.zeros((1, 6)), torch.tensor([0.5]), last).tolist() == [2]
    assert draw(torch.zeros((1, 6)), torch.tensor([0.5]), torch.zeros(1)).tolist() == [0]
