"""The protocol: every token once, behind the context that it promises; the mean against float64."""

import math

import pytest
import torch

from reset.analyze.perplexity import Window, perplexity, windows
from tests.reset.toy_model import toy_llama

V = 40


@pytest.mark.parametrize("length", [2, 3, 7, 8, 9, 31])
@pytest.mark.parametrize(("context", "stride"), [(8, 8), (8, 3), (8, 1), (2, 1), (2, 2)])
def test_every_token_is_scored_once_behind_enough_context(length, context, stride):
    scored = []
    for window in windows(length, context, stride):
        assert 0 < window.end - window.begin <= context
        for token in range(window.first, window.end):
            scored.append(token)
            assert token - window.begin >= min(token, 1 if stride == context else context - stride)
    if stride == context:  # the first of each window has nothing before it
        assert scored == [token for token in range(length) if token % context]
    else:
        assert scored == list(range(1, length))


def test_the_usual_protocol_by_hand():
    assert list(windows(7, 3, 3)) == [Window(0, 1, 3), Window(3, 4, 6)]
    assert list(windows(7, 4, 2)) == [Window(0, 1, 4), Window(2, 4, 6), Window(4, 6, 7)]


@pytest.mark.parametrize(("context", "stride"), [(1, 1), (4, 0), (4, 5)])
def test_bad_protocols(context, stride):
    with pytest.raises(ValueError, match=f"context is {context} and stride {stride}"):
        list(windows(9, context, stride))


@pytest.mark.parametrize(("context", "stride"), [(16, 16), (16, 5)])
@torch.no_grad()
def test_perplexity_is_that_of_the_windows_one_by_one(context, stride):
    model = toy_llama(V).double()
    ids = torch.randint(0, V, (50,), generator=torch.Generator().manual_seed(2)).tolist()
    losses = []
    for window in windows(len(ids), context, stride):
        logits = model(torch.tensor([ids[window.begin : window.end]])).logits[0]
        for token in range(window.first, window.end):
            row = logits[token - window.begin - 1].log_softmax(-1)
            losses.append(-float(row[ids[token]]))
    seen = []
    result = perplexity(model, ids, context=context, stride=stride, advance=seen.append)
    assert result.tokens == len(losses)
    assert result.windows == seen[-1] == len(seen)
    assert result.mean_nll_nats == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.mean_nll_nats))


def test_a_text_of_one_token_has_none():
    with pytest.raises(ValueError, match="the text has 1 tokens, need at least 2"):
        perplexity(toy_llama(V), [1], context=8, stride=8)
