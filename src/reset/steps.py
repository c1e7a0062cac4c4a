"""Where a reasoning step ends: an automaton over token ids, compiled from a tokenizer.

A token ends a step if an occurrence of the delimiter (a blank line by default) ends inside the
token's text, whichever way the tokenizer cuts it: one token that holds it (".\\n\\n"), or one that
ends in "\\n" followed by one that starts with "\\n". The automaton is the Knuth-Morris-Pratt
matcher of the delimiter, advanced by a whole token at a time; its state is the length of the
delimiter prefix that the output ends with. Knows nothing of entropies or temperatures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reset.text import vocabulary_texts

_ENDED = 128  # bit 7 of a table entry; the lower bits hold the next state
_MAX_DELIMITER = 127


class StepDetector:
    """Step automaton: `table[token, state]` holds the next state and whether the step ended.

    Prompt tokens never count: a request starts in state 0 with its first output token.

    Example:
        >>> detector = StepDetector.from_pieces(["a", "\\n", ".\\n\\n"])
        >>> state = detector.initial_state(1)
        >>> for token in (0, 1, 1):
        ...     state, ended = detector.advance(state, torch.tensor([token]))
        >>> bool(ended)
        True
    """

    def __init__(self, table: Tensor, delimiter: str) -> None:
        """Wrap a compiled table; use `from_tokenizer` or `from_pieces` to make one.

        Args:
            table: [V, S] uint8, S = len(delimiter): next state in bits 0-6, "step ended" in bit 7.
            delimiter: the text that ends a step.
        """
        # Token-major, so that a token id outside 0 .. V-1 gives an index outside the table and is
        # an error, on the host and on the device; state-major, -1 would read a neighbour's row.
        self.table = table
        self.delimiter = delimiter
        self._flat = table.reshape(-1)

    @property
    def vocab_size(self) -> int:
        """V: token ids 0 .. V-1 are known."""
        return self.table.shape[0]

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Any, delimiter: str = "\n\n", vocab_size: int | None = None
    ) -> StepDetector:
        """Compile the automaton of a Hugging Face tokenizer.

        Args:
            tokenizer: anything with `decode`, `encode` and `get_vocab`.
            delimiter: text that ends a step, 1 .. 127 characters.
            vocab_size: width of the model's logits if it is padded beyond the tokenizer; the ids
                in between carry no text and change nothing.

        Raises:
            ValueError: no sequence of this tokenizer's tokens can spell the delimiter.
        """
        detector = cls.from_pieces(vocabulary_texts(tokenizer), delimiter)
        return detector if vocab_size is None else detector.padded_to(vocab_size)

    @classmethod
    def from_pieces(cls, pieces: Sequence[str], delimiter: str = "\n\n") -> StepDetector:
        """Compile from the text of every token, `pieces[id]`.

        Raises:
            ValueError: the delimiter is empty or too long, or no token sequence can spell it.
        """
        if not 1 <= len(delimiter) <= _MAX_DELIMITER:
            raise ValueError(
                f"the step delimiter {delimiter!r} has {len(delimiter)} characters; "
                f"1 to {_MAX_DELIMITER} are needed"
            )
        states = len(delimiter)
        failure = _failure_function(delimiter)
        letters = set(delimiter)
        table = torch.zeros((len(pieces), states), dtype=torch.uint8)
        for token, piece in enumerate(pieces):
            if piece == "":
                table[token] = _no_text(states)
            elif not letters.isdisjoint(piece):
                entries = [_walk(state, piece, delimiter, failure) for state in range(states)]
                table[token] = torch.tensor(entries, dtype=torch.uint8)
        if not _can_end(table):
            raise ValueError(
                f"no sequence of the tokenizer's {len(pieces)} tokens spells the step delimiter "
                f"{delimiter!r}, so no step would ever end. Pass the delimiter that this model's "
                "text uses, or check that the tokenizer belongs to the model"
            )
        return cls(table, delimiter)

    def padded_to(self, vocab_size: int) -> StepDetector:
        """The same automaton for at least `vocab_size` ids; the ids added carry no text."""
        missing = vocab_size - self.vocab_size
        if missing <= 0:
            return self
        rows = _no_text(self.table.shape[1]).to(self.table.device).expand(missing, -1)
        return StepDetector(torch.cat([self.table, rows]), self.delimiter)

    def to(self, device: torch.device | str) -> StepDetector:
        """The same automaton with its table on `device`."""
        return StepDetector(self.table.to(device), self.delimiter)

    def initial_state(self, batch: int) -> Tensor:
        """[batch] int64 zeros on the table's device: nothing generated yet."""
        return torch.zeros(batch, dtype=torch.int64, device=self.table.device)

    def advance(self, state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Feed one output token per row.

        Args:
            state: [B] int64, from `initial_state` or the previous call.
            token: [B] int64 or int32, the output token just chosen.

        Returns:
            (state [B] int64, ended [B] bool). `ended`: this token was the last of its step; the
            next token is the first of a new one. No host synchronisation.

        Raises:
            IndexError: a token id is outside the vocabulary (on CUDA: a device-side assertion).
        """
        entry = self._flat.index_select(0, token.to(torch.int64) * self.table.shape[1] + state)
        return (entry & (_ENDED - 1)).to(torch.int64), entry >= _ENDED


def _no_text(states: int) -> Tensor:
    """[states] uint8: table row of a token that adds no text, so that nothing changes."""
    return torch.arange(states, dtype=torch.uint8)


def _failure_function(delimiter: str) -> list[int]:
    """failure[n]: length of the longest proper border of the first n characters (KMP)."""
    failure = [0] * (len(delimiter) + 1)
    border = 0
    for position in range(1, len(delimiter)):
        while border and delimiter[position] != delimiter[border]:
            border = failure[border]
        border += delimiter[position] == delimiter[border]
        failure[position + 1] = border
    return failure


def _walk(state: int, piece: str, delimiter: str, failure: list[int]) -> int:
    """Table entry for reading `piece` from `state`."""
    ended = 0
    for character in piece:
        while state and character != delimiter[state]:
            state = failure[state]
        state += character == delimiter[state]
        if state == len(delimiter):
            ended = _ENDED
            state = failure[state]  # occurrences may overlap: "\n\n\n" is two blank lines
    return state | ended


def _can_end(table: Tensor) -> bool:
    """True if some token sequence that starts in state 0 ends a step."""
    if table.shape[0] == 0:
        return False
    reached, frontier = {0}, [0]
    while frontier:
        entries = set(table[:, frontier.pop()].unique().tolist())
        if any(entry >= _ENDED for entry in entries):
            return True
        frontier += (new := entries - reached)
        reached |= new
    return False
