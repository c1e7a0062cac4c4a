"""The step automaton: piece sequences, real tokenizers, arbitrary delimiters."""

import random
from types import SimpleNamespace

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from reset import StepDetector


def boundaries(detector: StepDetector, tokens: list[int]) -> list[int]:
    """1-based numbers of the tokens that end a step."""
    state, ends = detector.initial_state(1), []
    for number, token in enumerate(tokens, start=1):
        state, ended = detector.advance(state, torch.tensor([token]))
        if ended.item():
            ends.append(number)
    return ends


def piece_boundaries(pieces: list[str], delimiter: str = "\n\n") -> list[int]:
    vocabulary = [*dict.fromkeys(pieces), "\n", "\n\n", delimiter]
    detector = StepDetector.from_pieces(vocabulary, delimiter)
    return boundaries(detector, [vocabulary.index(piece) for piece in pieces])


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["one", ".\n\n", "two", ")\n\n", "x"], [2, 4]),  # S1
        (["a", "\n", "\n", "b"], [3]),  # S1
        ([".\n", "\n", "A"], [2]),  # S1: an id list of newline tokens misses this one
        (["x", "\n\n\n", "y"], [2]),
        (["x", "\n\n ", "y", " \n\n", "z"], [2, 4]),  # S3
        (["a", "\n", " ", "\n", "b"], []),
        (["\n", "x", "\n", "\n"], [4]),
        (["a\n", "\nb\n", "\nc"], [2, 3]),
        (["\n", "\n", "\n"], [2, 3]),  # occurrences overlap
        (["\n\n", "\n\n"], [1, 2]),
        (["a", "", "\n", "", "\n"], [5]),  # a token without text does not break a blank line
    ],
)
def test_s1_s3_pieces_to_boundaries(pieces, expected):
    assert piece_boundaries(pieces) == expected


def test_s4_prompt_tokens_never_count():
    """The prompt ends in a newline; the first output piece is one: no blank line."""
    assert piece_boundaries(["\n"]) == []
    assert piece_boundaries(["\n", "\n"]) == [2]


@pytest.mark.parametrize("delimiter", ["\n\n", "aab", "abab", "</step>", "\n"])
def test_any_delimiter_agrees_with_string_search(delimiter):
    """Truth: a token ends a step iff an occurrence of the delimiter ends inside its text."""
    rng = random.Random(delimiter)
    letters = [*sorted(set(delimiter)), "x"]
    pieces = ["".join(rng.choices(letters, k=rng.randint(1, 4))) for _ in range(60)]
    pieces += [*letters, delimiter]
    detector = StepDetector.from_pieces(pieces, delimiter)
    tokens = rng.choices(range(len(pieces)), k=3000)
    text, expected = "", []
    for number, token in enumerate(tokens, start=1):
        start = len(text)
        text += pieces[token]
        ends = range(max(start + 1, len(delimiter)), len(text) + 1)
        if any(text[end - len(delimiter) : end] == delimiter for end in ends):
            expected.append(number)
    assert len(expected) > 20
    assert boundaries(detector, tokens) == expected


def test_rows_are_independent():
    detector = StepDetector.from_pieces(["a", "\n"])
    state = detector.initial_state(3)
    state, ended = detector.advance(state, torch.tensor([1, 0, 1]))
    assert ended.tolist() == [False, False, False]
    state, ended = detector.advance(state, torch.tensor([1, 1, 0]))
    assert ended.tolist() == [True, False, False]
    _, ended = detector.advance(state, torch.tensor([0, 1, 1]))
    assert ended.tolist() == [False, True, False]


@pytest.mark.parametrize("token", [-1, 2])
def test_ids_outside_the_vocabulary_are_an_error(token):
    """-1 is what an asynchronous engine puts where it does not know the token yet (report L1)."""
    detector = StepDetector.from_pieces(["a", "\n"])
    for state in (0, 1):
        with pytest.raises(IndexError):
            detector.advance(torch.tensor([state]), torch.tensor([token]))


def byte_level() -> PreTrainedTokenizerFast:
    """A GPT-2 style tokenizer: bytes as letters, some merges over newlines."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    merges = [("Ċ", "Ċ"), (".", "ĊĊ"), (".", "Ċ"), ("Ġ", "ĊĊ"), ("ĊĊ", "Ġ")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A Llama-2 style tokenizer: a mark for the space, bytes as <0x0A>, leading space stripped."""
    pieces = ["<unk>", "▁", "a", "b", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_byte_level_tokenizer():
    tokenizer = byte_level()
    detector = StepDetector.from_tokenizer(tokenizer, vocab_size=400)
    assert detector.vocab_size == 400
    for text, expected in [("a.\n\nb", [2]), ("a\n\nb", [2]), ("a.\n", []), ("a \n\nb", [2])]:
        assert boundaries(detector, tokenizer.encode(text)) == expected, text
    padded = boundaries(detector, [*tokenizer.encode("a.\n"), 399, *tokenizer.encode("\n")])
    assert padded == [4]


def test_sentencepiece_like_tokenizer():
    tokenizer = sentencepiece_like()
    detector = StepDetector.from_tokenizer(tokenizer)
    ids = tokenizer.convert_tokens_to_ids(["▁a", "<0x0A>", "<0x0A>", "b", "<0x0A>", "a"])
    assert boundaries(detector, ids) == [3]


def test_leading_space_of_a_token_is_part_of_its_text():
    """A decoder that strips the text's first space must not hide it from a delimiter with one."""
    detector = StepDetector.from_tokenizer(sentencepiece_like(), delimiter=" a")
    assert boundaries(detector, [4]) == [1]  # "▁a"


def test_tokenizer_without_a_fast_backend():
    """Only `decode`, `encode` and `get_vocab` are needed."""
    pieces = ["a", "\n", ".\n\n"]
    slow = SimpleNamespace(
        get_vocab=lambda: {piece: index for index, piece in enumerate(pieces)},
        encode=lambda text, add_special_tokens: [pieces.index(text)],
        decode=lambda ids, **_: "".join(pieces[i] for i in ids),
    )
    assert boundaries(StepDetector.from_tokenizer(slow), [0, 1, 1, 2]) == [3, 4]


def test_tokenizer_without_newline_tokens_is_refused():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    with pytest.raises(ValueError, match=r"3 tokens spells the step delimiter '\\n\\n'"):
        StepDetector.from_tokenizer(fast)
    with pytest.raises(ValueError, match="has 0 characters"):
        StepDetector.from_pieces(["a"], "")
    with pytest.raises(ValueError, match="0 tokens"):
        StepDetector.from_pieces([])


def test_moving_to_a_device_keeps_the_automaton():
    detector = StepDetector.from_pieces(["a", "\n"]).to("cpu")
    assert boundaries(detector, [1, 1]) == [2]
