"""The trained model in transformers on a CPU, BF16 weights and NVFP4: does it still reason?"""

from __future__ import annotations

import pytest

from nvfp4r import NVFP4Linear
from reset.engine import generate, load_engine, make_prompt
from reset.evaluate.problems import Answer
from tests import pocket as held_out

pytestmark = pytest.mark.pocket


def transformers_answers(pocket, engine):
    """Greedy answers by `generate` of transformers, all in one batch, padded on the left."""
    asked = held_out.requests(pocket)
    prompts = [make_prompt(engine, one.messages[0][1]) for one in asked]
    traces = generate(
        engine, prompts, held_out.GREEDY, max_new_tokens=asked[0].max_tokens, alternatives=0
    )
    ids = [[token.token_id for token in trace.tokens] for trace in traces]
    texts = engine.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return {
        number: Answer(text, trace.finish_reason, len(trace.tokens))
        for number, (text, trace) in enumerate(zip(texts, traces, strict=True))
    }


@pytest.fixture(scope="module")
def plain(pocket):
    return transformers_answers(pocket, load_engine(str(pocket), dtype="float32"))


@pytest.fixture(scope="module")
def quantised(pocket, pocket_nvfp4):
    engine = load_engine(str(pocket_nvfp4), dtype="float32")
    linear = [module for module in engine.model.modules() if isinstance(module, NVFP4Linear)]
    assert len(linear) == 7 * engine.model.config.num_hidden_layers
    return transformers_answers(pocket, engine)


def test_it_solves_what_it_solved_after_its_training(pocket, plain):
    found = held_out.right(pocket, plain)
    for family, floor in held_out.floors(pocket).items():
        assert found[family] >= floor, found


def test_in_nvfp4_it_still_reasons(pocket, quantised):
    found = held_out.right(pocket, quantised)
    for family, floor in held_out.floors(pocket, held_out.COST).items():
        assert found[family] >= floor, found


def test_the_batched_decoder_gives_the_same_answers(pocket, plain):
    same = held_out.batched(pocket, pocket)
    assert {number: plain[number] for number in same} == same


def test_the_batched_decoder_gives_the_same_answers_in_nvfp4(pocket, pocket_nvfp4, quantised):
    same = held_out.batched(pocket, pocket_nvfp4)
    assert {number: quantised[number] for number in same} == same
