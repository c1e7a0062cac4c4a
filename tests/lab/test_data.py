"""Training rows: targets by hand, packing, the same stream whoever makes it."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from lab.pocket_reasoner import tokenizer
from lab.pocket_reasoner.arithmetic import Chain, ChainDifficulty, work
from lab.pocket_reasoner.data import IGNORED, Stream, chunks, example_tokens, make_chunk
from lab.pocket_reasoner.measure import QUICK, Scale
from lab.pocket_reasoner.model import MAX_POSITIONS
from lab.pocket_reasoner.problems import EVALUATION, TRAINING, Difficulty
from lab.pocket_reasoner.search import SearchDifficulty
from lab.pocket_reasoner.train import Training

EASY = Difficulty(chain=ChainDifficulty(steps=(1, 2), digits=(1, 2)))
STREAM = Stream(EASY, seed=5, length=448, rows=4)
IDS = tokenizer.IDS


def test_loss_is_on_solutions_alone():
    draw = random.Random(0)
    for _ in range(100):
        ids, targets = example_tokens(draw, EASY)
        start = ids.index(IDS[tokenizer.ASSISTANT])
        assert ids[:2] == [IDS[tokenizer.BEGIN], IDS[tokenizer.USER]]
        assert ids[-1] == IDS[tokenizer.END]
        assert targets == [*([IGNORED] * start), *ids[start + 1 :], IGNORED]
        text = "".join(tokenizer.VOCABULARY[number] for number in ids[start + 1 : -1])
        assert re.fullmatch(r"\d[\s\S]*\\boxed\{.+\}", text)


def test_some_prompts_ask_as_reset_run_does():
    draw = random.Random(1)
    asked = [
        tokenizer.IDS["Work through the problem step by step."] in example_tokens(draw, EASY)[0]
        for _ in range(400)
    ]
    assert 0.05 < np.mean(asked) < 0.16


def test_rows_hold_whole_examples_and_padding():
    ids, targets = make_chunk(STREAM, 0)
    assert (ids.shape, targets.shape) == ((4, 448), (4, 448))
    for row, wanted in zip(ids, targets, strict=True):
        used = int((row != IDS[tokenizer.PAD]).sum())
        assert used > 300
        assert (row[used:] == IDS[tokenizer.PAD]).all()
        assert (wanted[used:] == IGNORED).all()
        assert row[used - 1] == IDS[tokenizer.END]
        begins, ends = (row == IDS[tokenizer.BEGIN]).sum(), (row == IDS[tokenizer.END]).sum()
        assert begins == ends > 1


def test_the_stream_is_the_same_whoever_makes_it():
    with chunks(STREAM, 5, processes=0) as alone, chunks(STREAM, 5, processes=1) as helped:
        one, two = list(alone), list(helped)
    assert len(one) == 5
    for (ids, targets), (other_ids, other_targets) in zip(one, two, strict=True):
        assert np.array_equal(ids, other_ids)
        assert np.array_equal(targets, other_targets)
    assert not np.array_equal(one[0][0], one[1][0])
    assert np.array_equal(one[3][0], make_chunk(STREAM, 3)[0])


@pytest.mark.parametrize("chain_share", [0.0, 1.0])
def test_the_longest_examples_fit_the_model(chain_share):
    hardest = Difficulty(
        chain=ChainDifficulty(steps=(16, 16), digits=(5, 5)),
        search=SearchDifficulty(numbers=(5, 5), insight=0.01),  # one number more than by default
        chain_share=chain_share,
    )
    assert hardest.chain.steps[1] == TRAINING.chain.steps[1]
    assert hardest.chain.digits[1] == TRAINING.chain.digits[1]
    draw = random.Random(2)
    longest = max(len(example_tokens(draw, hardest)[0]) for _ in range(400 if chain_share else 60))
    assert 360 < longest <= MAX_POSITIONS


def test_the_longest_question_leaves_room_for_an_answer():
    """With what `reset-run --prompt task` adds, and as many tokens as the study and the training
    allow; no worked chain needs as many."""
    chain = Chain(99_999, (("+", 99_999),) * 16)
    assert len(chain.operations) == EVALUATION.chain.steps[1] == TRAINING.chain.steps[1]
    prompt = tokenizer.encode_prompt(chain.question + tokenizer.INSTRUCTION)
    assert len(prompt) == 112
    for limit in (Scale().max_tokens, QUICK.max_tokens, Training().max_tokens):
        assert len(prompt) + limit <= MAX_POSITIONS
        assert len(tokenizer.encode_text(work(chain))) < limit


def test_an_example_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"an example has \d+ tokens, but a row has 30"):
        make_chunk(Stream(EASY, 0, 30, 1), 0)
    with pytest.raises(ValueError, match="need at least 1 row of 2"):
        Stream(EASY, 0, 1, 1)
