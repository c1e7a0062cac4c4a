"""Scores of given tokens against float64, however the sequence is cut, and the memory they take."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from reset.analyze.measure import (
    LOGITS_BYTES,
    ROWS_BYTES,
    Chunks,
    chunk_sizes,
    score_rows,
    score_tokens,
)
from tests.reset.toy_model import toy_llama

V = 40


@pytest.fixture(scope="module")
def model():
    """In float64, so that another order of sums is no other result."""
    return toy_llama(V).double()


@pytest.fixture(scope="module")
def sequence():
    return torch.randint(0, V, (60,), generator=torch.Generator().manual_seed(1)).tolist()


@torch.no_grad()
def truth(model, sequence, first):
    """Entropy, log-probability and rank from one forward pass over the whole sequence."""
    logprobs = model(torch.tensor([sequence])).logits[0].double().log_softmax(-1)
    entropies, own, ranks = [], [], []
    for position in range(first, len(sequence)):
        row = logprobs[position - 1]
        entropies.append(float(-(row.exp() * row).sum()))
        own.append(float(row[sequence[position]]))
        ranks.append(sum(value > own[-1] for value in row.tolist()))
    return entropies, own, ranks


@pytest.mark.parametrize("chunks", [(1, 1), (7, 3), (8, 8), (59, 10), (512, 73)])
@pytest.mark.parametrize("first", [1, 9])
def test_scores_do_not_depend_on_how_the_sequence_is_cut(model, sequence, chunks, first):
    entropies, own, ranks = truth(model, sequence, first)
    scores = score_tokens(model, sequence[:first], sequence[first:], chunks=Chunks(*chunks))
    # Scores are float32 of values up to 40: rounding of the logits, 2^-24 x 40, dominates.
    assert scores.entropy_nats == pytest.approx(entropies, abs=1e-5)
    assert scores.logprob_nats == pytest.approx(own, abs=1e-5)
    assert scores.rank.tolist() == ranks
    assert [a.dtype.name for a in scores] == ["float32", "float32", "int32"]


def test_rank_counts_lower_ids_among_equals():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]] * 4)
    _, _, rank = score_rows(logits, torch.tensor([1, 2, 4, 0]))
    assert rank.tolist() == [0, 1, 2, 3]


def test_c1_entropy_is_that_of_the_raw_logits():
    entropy, logprob, _ = score_rows(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]))
    assert float(entropy) == pytest.approx(0.8324, abs=5e-5)
    assert float(logprob) == pytest.approx(2 - math.log(math.e**2 + math.e + 1), abs=1e-6)
    tempered, _, _ = score_rows(torch.tensor([[2.0, 1.0, 0.0]]) / 0.6, torch.tensor([0]))
    assert float(tempered) == pytest.approx(0.5567, abs=5e-5)  # what it must not be


def test_c2_entropy_is_over_the_whole_vocabulary():
    entropy, _, _ = score_rows(torch.zeros(1, 1000), torch.tensor([0]))
    assert float(entropy) == pytest.approx(math.log(1000), abs=1e-5)  # the top 20 alone: 2.996


@pytest.mark.parametrize("vocab_size", [300, 49_152, 151_936, 262_144])
@pytest.mark.parametrize("bytes_per_logit", [2, 4])
def test_pieces_fit_the_budget(vocab_size, bytes_per_logit):
    chunks = chunk_sizes(vocab_size, bytes_per_logit)
    assert 1 <= chunks.rows <= chunks.tokens <= 512
    assert chunks.tokens * vocab_size * bytes_per_logit <= LOGITS_BYTES
    assert chunks.rows * vocab_size * 24 <= ROWS_BYTES


MEASURED = """
import re, torch
from pathlib import Path
from types import SimpleNamespace
from reset.analyze.measure import Chunks, score_tokens

V = 80_000

class Model(torch.nn.Module):
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(V, 8), torch.nn.Linear(8, V)
        text = SimpleNamespace(vocab_size=V)
        self.config = SimpleNamespace(get_text_config=lambda: text)

    def forward(self, input_ids, cache=None, use_cache=None):
        return {"logits": self.head(self.embed(input_ids)), "cache": "some"}

def peak():
    # Not ru_maxrss: a process inherits that of the one that started it.
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1])

model, ids = Model(), list(range(401))
score_tokens(model, ids[:1], ids[1:3])
before = peak()
score_tokens(model, ids[:1], ids[1:], chunks=Chunks(tokens=200, rows=5))
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_memory_does_not_grow_with_tokens_times_vocabulary():
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    of_chunk, of_rows = 80_000 * 200 * 4, 80_000 * 5 * 24  # 64 MB and 10 MB
    # A second chunk held on to, and with it tokens x vocabulary, would be 128 MB.
    assert int(done.stdout) < 1.25 * (of_chunk + of_rows)


@pytest.mark.parametrize(
    ("prompt", "tokens", "message"),
    [
        ([], [1], "0 prompt tokens and 1 tokens"),
        ([1], [], "1 prompt tokens and 0 tokens"),
        ([1], [2, V, 3], f"token {V} at position 2 is outside the model's {V} ids"),
        ([1], [-1], "token -1 at position 1"),
        ([1] * 1000, [1] * 25, "1025 tokens, but the model was made for 1024"),
    ],
)
def test_bad_sequences(model, prompt, tokens, message):
    with pytest.raises(ValueError, match=message):
        score_tokens(model, prompt, tokens)


class Scripted:
    """A model that answers every token with the same logits."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, logits, cache="some"):
        self.logits, self.cache = torch.tensor(logits), cache
        text = SimpleNamespace(vocab_size=len(logits))
        self.config = SimpleNamespace(get_text_config=lambda: text)

    def forward(self, input_ids, cache=None, use_cache=None):
        return {"logits": self.logits.expand(*input_ids.shape, -1), "cache": self.cache}

    __call__ = forward


def test_nan_is_an_error_that_names_the_position():
    with pytest.raises(ValueError, match="output position 0 hold NaN"):
        score_tokens(Scripted([0.0, math.nan]), [0], [1, 1])


def test_a_model_without_a_cache_is_refused():
    with pytest.raises(ValueError, match="returns no cache"):
        score_tokens(Scripted([0.0, 0.0], cache=None), [0], [1, 1])
