"""What a token adds to the text, by the tokenizer's own decoder.

Knows Hugging Face tokenizers, fast ones and others; knows nothing of steps or temperatures.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def decode(tokenizer: Any, tokens: list[int]) -> str:
    """Text of `tokens` as they are: special tokens kept, spaces not tidied."""
    text: str = tokenizer.decode(
        tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def vocabulary_texts(tokenizer: Any) -> list[str]:
    """Text of every token id as it appears inside an output, `texts[id]`.

    Each token is decoded behind a plain-letter token: decoders of the SentencePiece family drop a
    leading space of the whole text, which would change a token such as " \\n". A token that holds a
    part of a character gives U+FFFD.

    Args:
        tokenizer: anything with `decode`, `encode` and `get_vocab`; a fast one is decoded in one
            batch (0.3 s for 50,000 tokens).
    """
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    anchor = tokenizer.encode("a", add_special_tokens=False)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rows = [[*anchor, token] for token in range(size)]
        texts = backend.decode_batch(rows, skip_special_tokens=False)
        head = backend.decode(anchor, skip_special_tokens=False)
    else:
        texts = [decode(tokenizer, [*anchor, token]) for token in range(size)]
        head = decode(tokenizer, anchor)
    return [text[len(head) :] if text.startswith(head) else text for text in texts]


class TextStream:
    """Turns a growing list of token ids into pieces of text, one piece a token.

    A character that several tokens make up comes with the last of them; the others give "". The
    pieces joined are the decoded text.

    Example, with a tokenizer whose tokens are bytes:
        >>> stream = TextStream(tokenizer)
        >>> [stream.push(token) for token in tokenizer.encode("é!")]
        ['', 'é', '!']
    """

    # How many tokens before the new one are decoded with it: enough for any decoder that looks at
    # a neighbour, few enough that a long text stays linear.
    _CONTEXT = 8

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._emitted = ""  # the part of the decoded context that is out already

    def push(self, token: int) -> str:
        """The text that `token` adds; "" while a character is incomplete."""
        self._ids.append(token)
        text = decode(self._tokenizer, self._ids)
        if text.endswith("\ufffd") or not text.startswith(self._emitted):
            return ""
        piece = text[len(self._emitted) :]
        self._emitted = text
        if len(self._ids) > 2 * self._CONTEXT:
            self._ids = self._ids[-self._CONTEXT :]
            self._emitted = decode(self._tokenizer, self._ids)
        return piece

    def flush(self) -> str:
        """What is left at the end: the replacement of an incomplete character, or ""."""
        text = decode(self._tokenizer, self._ids)
        piece = text[len(self._emitted) :] if text.startswith(self._emitted) else ""
        self._emitted = text
        return piece


def token_pieces(tokenizer: Any, tokens: Iterable[int]) -> list[str]:
    """One piece of text a token, as `TextStream` cuts it; the last takes what is incomplete."""
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokens]
    if pieces:
        pieces[-1] += stream.flush()
    return pieces
