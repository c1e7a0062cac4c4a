"""The tokenizer: the fast path and the saved file agree, texts come back, steps are seen."""

from __future__ import annotations

import random

import pytest
import torch
from lab.pocket_reasoner import tokenizer
from lab.pocket_reasoner.problems import TRAINING, training_example
from transformers import AutoTokenizer

from reset import StepDetector
from reset.evaluate.problems import Problem
from reset.evaluate.prompts import messages


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def conversations(count):
    draw = random.Random(9)
    for _ in range(count):
        yield training_example(draw, TRAINING)


def test_there_are_128_tokens_and_each_is_itself(saved):
    assert len(saved) == len(set(tokenizer.VOCABULARY)) == tokenizer.VOCABULARY_SIZE == 128
    assert saved.get_vocab() == tokenizer.IDS
    for token, number in tokenizer.IDS.items():
        assert saved.decode([number]) == token


def test_special_tokens(saved):
    assert (saved.bos_token, saved.eos_token, saved.pad_token, saved.unk_token) == (
        "<|begin|>",
        "<|end|>",
        "<|pad|>",
        "<|unknown|>",
    )
    assert saved("12", add_special_tokens=True)["input_ids"] == saved("12")["input_ids"]


def test_generated_texts_come_back_and_both_encoders_agree(saved):
    for question, solution in conversations(200):
        text = tokenizer.conversation(question, solution)
        end = tokenizer.IDS[tokenizer.END]
        ids = [*tokenizer.encode_prompt(question), *tokenizer.encode_text(solution), end]
        assert saved(text)["input_ids"] == ids
        assert saved.decode(ids) == text
        assert tokenizer.IDS[tokenizer.UNKNOWN] not in ids


def test_digits_and_line_breaks_are_single_tokens(saved):
    tokens = [saved.decode([number]) for number in saved("90210\n7\n\n4\n\n\n5")["input_ids"]]
    assert tokens == ["9", "0", "2", "1", "0", "\n", "7", "\n\n", "4", "\n\n", "\n", "5"]


def test_any_text_can_be_encoded(saved):
    text = "Ünïcode 漢 and ~ \t tabs"
    ids = saved(text)["input_ids"]
    assert ids == tokenizer.encode_text(text)
    assert ids.count(tokenizer.IDS[tokenizer.UNKNOWN]) == 4  # Ü, ï, 漢, tab


def test_the_chat_template_is_what_training_uses(saved):
    question = "Use 3, 7, 8 to make 29."
    chat = [{"role": "user", "content": question}]
    text = saved.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert saved(text, add_special_tokens=False)["input_ids"] == tokenizer.encode_prompt(question)
    whole = [*chat, {"role": "assistant", "content": "3x7=21"}]
    assert saved.apply_chat_template(whole, tokenize=False) == tokenizer.conversation(
        question, "3x7=21"
    )


def test_a_system_prompt_is_refused(saved):
    with pytest.raises(Exception, match="roles user and assistant alone"):  # jinja2's own class
        saved.apply_chat_template([{"role": "system", "content": "x"}], tokenize=False)


def test_the_instruction_is_that_of_reset_run():
    asked = Problem("p", "Use 3, 7, 8 to make 29.", "maths", "29")
    ((_, content),) = messages(asked, "task")
    assert content == asked.question + tokenizer.INSTRUCTION
    assert len(tokenizer.encode_text(tokenizer.INSTRUCTION)) == 6


def test_the_step_detector_sees_every_step(saved):
    detector = StepDetector.from_tokenizer(saved)
    for _, solution in conversations(50):
        state, steps = detector.initial_state(1), 0
        for number in tokenizer.encode_text(solution):
            state, ended = detector.advance(state, torch.tensor([number]))
            steps += bool(ended)
        assert steps == solution.count("\n\n") > 0
