"""Names that scripts written for the public reference import from `reset`."""

from __future__ import annotations

from typing import Any

from reset.text import vocabulary_texts


def get_newline_token_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids of a single newline, and ids of tokens that hold a blank line.

    Such scripts send both lists with every request. Nothing here needs them: the engine finds the
    ends of steps itself, also where a blank line is cut into two tokens in other ways.

    Args:
        tokenizer: anything with `decode`, `encode` and `get_vocab`.
    """
    texts = vocabulary_texts(tokenizer)
    single = [token for token, text in enumerate(texts) if text == "\n"]
    double = [token for token, text in enumerate(texts) if "\n\n" in text]
    return single, double
