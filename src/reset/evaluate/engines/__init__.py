"""What decodes answers: one protocol, and an engine a module.

Nothing here is loaded before it is chosen; an engine knows nothing of tasks, grades and scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from reset.config import ReSETConfig
from reset.evaluate.problems import Answer


@dataclass(frozen=True)
class Request:
    """One answer to decode.

    Args:
        messages: the conversation, as (role, content) pairs.
        seed: of this answer alone, 0 .. 2**31 - 1.
        config: temperature policy.
        max_tokens: output limit, >= 1.
        top_p: nucleus, (0, 1], after the temperature.
        min_p: share of the likeliest token's probability that a token needs, [0, 1); 0 is off.
    """

    messages: tuple[tuple[str, str], ...]
    seed: int
    config: ReSETConfig
    max_tokens: int
    top_p: float = 0.95
    min_p: float = 0.0

    def chat(self) -> list[dict[str, str]]:
        """The messages as chat templates and servers take them."""
        return [{"role": role, "content": content} for role, content in self.messages]


class Engine(Protocol):
    """Decodes requests, in any order.

    An answer must depend on its own request alone, not on what is decoded beside it: a run that is
    killed and resumed asks for the missing answers in another company.
    """

    def describe(self) -> dict[str, Any]:
        """What decides the answers beside the requests: model, its hash, format, versions."""

    def render(self, request: Request) -> str | None:
        """The prompt as the model sees it; None if a server makes it."""

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        """Position in `requests` and answer, each as soon as it is there.

        Raises:
            OSError: the engine cannot go on; what was yielded before stands.
            ValueError: a request that it cannot serve.
        """


class EngineStoppedError(OSError):
    """An engine that gave up; what it yielded before is whole."""
