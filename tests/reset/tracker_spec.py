"""One slot of the tracker as a scalar program: histories are lists, steps are found in the text.

It is the truth for every path of `RequestTracker`, and shares no code with `reset`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.reset.spec import Request, Token

PIECES = ["\n\n", "a", "b", "\n", ".\n\n", "c\n", "\nd", " ", "", *"efghijklmnop"]
DELIMITER = "\n\n"


@dataclass
class History:
    request: Request
    text: str = ""
    entropies: list[float] = field(default_factory=list)
    steps: int = 0
    high: int = 0

    def read(self, token: int) -> bool:
        """Append the token's text; True if an occurrence of the delimiter ends inside it."""
        before = len(self.text)
        self.text += PIECES[token]
        ends = range(before + 1, len(self.text) + 1)
        return any(self.text[:end].endswith(DELIMITER) for end in ends)


class Slot:
    """`after[k]` is the history after k rows of the last call, which began at position `first`."""

    def __init__(self, config: dict, outputs: Sequence[int] = ()) -> None:
        self.config = config
        self.first = len(outputs)
        self.lost = 1 if outputs else 0
        text = "".join(PIECES[token] for token in outputs[:-1])
        self.after = [History(Request(**config), text)]

    def call(self, start: int, entropies: list[float], tokens: list[int]) -> list[Token]:
        kept = start - self.first
        if 0 <= kept < len(self.after):
            history = self.after[kept]
        else:
            history = copy.deepcopy(self.after[0])
            history.request, history.text = Request(**self.config), ""
            self.lost += 1
        self.first, self.after = start, [history]
        decided = []
        for offset, (entropy, token) in enumerate(zip(entropies, tokens, strict=True)):
            history = copy.deepcopy(history)
            new_step = history.read(token) if start + offset > 0 else False
            decision = history.request.feed(entropy, new_step)
            history.entropies.append(entropy)
            history.steps += new_step
            if self.config["policy"] != "fixed":
                history.high += not entropy < decision.threshold
            decided.append(decision)
            self.after.append(history)
        return decided

    def summary(self) -> list[float]:
        history = self.after[0]
        entropies = history.entropies
        return [len(entropies), history.steps, history.high, sum(entropies), self.lost]
