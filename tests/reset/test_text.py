"""Text of single tokens and of growing outputs."""

import random

import pytest

from reset.text import TextStream, decode, token_pieces, vocabulary_texts
from tests.reset.test_steps import sentencepiece_like
from tests.reset.toy_model import toy_tokenizer

TEXTS = ["Hi there.\n\nNext", "naïve 漢字 🙂 end", " leading", "a\u200d🙂"]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_decoded_text(text):
    tokenizer = toy_tokenizer()
    ids = tokenizer.encode(text)
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text == decode(tokenizer, ids)
    assert "\ufffd" not in "".join(pieces)


def test_a_character_comes_with_its_last_token():
    tokenizer = toy_tokenizer()
    pieces = token_pieces(tokenizer, tokenizer.encode("é!"))
    assert pieces == ["", "é", "!"]


def test_incomplete_characters_at_the_end_are_not_lost():
    tokenizer = toy_tokenizer()
    ids = tokenizer.encode("x🙂")[:-1]
    assert "".join(token_pieces(tokenizer, ids)) == "x\ufffd"
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in ids] == ["x", "", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_invalid_bytes_in_the_middle_do_not_swallow_the_text():
    tokenizer = toy_tokenizer()
    broken = [tokenizer.encode("é")[0]] * 40
    ids = [*tokenizer.encode("ab"), *broken, *tokenizer.encode("cd")]
    assert "".join(token_pieces(tokenizer, ids)) == decode(tokenizer, ids)


def test_random_tokens_of_a_long_output_join_to_the_decoded_text():
    tokenizer = toy_tokenizer()
    rng = random.Random(0)
    ids = [rng.randrange(len(tokenizer)) for _ in range(3000)]
    assert "".join(token_pieces(tokenizer, ids)) == decode(tokenizer, ids)


def test_leading_space_of_a_sentencepiece_token_is_kept_inside_an_output():
    tokenizer = sentencepiece_like()
    ids = tokenizer.convert_tokens_to_ids(["a", "▁a", "<0x0A>", "▁a"])
    assert token_pieces(tokenizer, ids) == ["a", " a", "\n", " a"]
    assert vocabulary_texts(tokenizer)[4] == " a"
