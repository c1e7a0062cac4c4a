r"""The tokenizer: 128 tokens, every digit and every line break one of its own.

Printable ASCII by character, "\n" and "\n\n", the few words that problems and solutions are made
of, and the marks of the chat template. Any other character is <|unknown|>. `encode_text` gives the
ids without the library, fast enough to make training data with; a test holds the two together.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

UNKNOWN, PAD, END = "<|unknown|>", "<|pad|>", "<|end|>"
BEGIN, USER, ASSISTANT = "<|begin|>", "<|user|>", "<|assistant|>"
_MARKS = (PAD, BEGIN, USER, ASSISTANT, END, UNKNOWN)
_BREAKS = ("\n\n", "\n")
_WORDS = (
    *("Start with ", ". Add ", ". Subtract ", ". Multiply by ", ". What is the result?"),
    *("Use ", " to make ", " for "),
    *("back ", " yes", " no", "\\boxed{"),
    # How `reset-run` asks for an answer unless told otherwise.
    *("Work through the problem step by step.", " Write the final answer inside "),
)
VOCABULARY_SIZE = 128
_CHARACTERS = tuple(chr(code) for code in range(0x20, 0x7F))
_SPARE = tuple(
    f"<|spare_{number}|>"
    for number in range(
        VOCABULARY_SIZE - len(_MARKS) - len(_BREAKS) - len(_WORDS) - len(_CHARACTERS)
    )
)
VOCABULARY = (*_MARKS, *_BREAKS, *_CHARACTERS, *_WORDS, *_SPARE)
IDS = {token: number for number, token in enumerate(VOCABULARY)}

INSTRUCTION = "\n\nWork through the problem step by step. Write the final answer inside \\boxed{}."
"""What `reset-run --prompt task` puts behind a question; a test compares."""

_PATTERN = "|".join(re.escape(piece) for piece in (*_BREAKS, *sorted(_WORDS, key=len)[::-1]))
_PIECE = re.compile(_PATTERN + r"|[\s\S]")

TEMPLATE = (
    "{{ '<|begin|>' }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('this model knows the roles user and assistant alone') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def encode_text(text: str) -> list[int]:
    """Token ids of ordinary text; marks of the template are not looked for in it."""
    return [IDS.get(piece, IDS[UNKNOWN]) for piece in _PIECE.findall(text)]


def encode_prompt(question: str) -> list[int]:
    """Token ids of a question within the chat template, ready for an answer."""
    return [IDS[BEGIN], IDS[USER], *encode_text(question), IDS[ASSISTANT]]


def conversation(question: str, solution: str) -> str:
    """A question and its solution as one text, marks included."""
    return f"{BEGIN}{USER}{question}{ASSISTANT}{solution}{END}"


def make_tokenizer() -> Any:
    """The tokenizer as transformers has it."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token=UNKNOWN))
    pattern = Regex(_PATTERN.replace("\\ ", " ") + r"|[\s\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    marks = [AddedToken(mark, special=True, normalized=False) for mark in (*_MARKS, *_SPARE)]
    tokenizer.add_special_tokens(marks)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, as transformers does.

    Raises:
        OSError: the folder cannot be written to.
    """
    make_tokenizer().save_pretrained(folder)
