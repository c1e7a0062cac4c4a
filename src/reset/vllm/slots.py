"""Which request owns which slot of the tracker, while it runs and while it is away.

A request that leaves the batch keeps its slot, as it may come back: vLLM does not say whether it
finished or was preempted. Slots of requests that left are reused, the longest away first. Host
bookkeeping alone; knows neither tensors nor vLLM.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from reset.config import ReSETConfig


@dataclass(eq=False)
class Tracked:
    """A request that ReSET works on.

    Args:
        key: equal for requests that may be one and the same; None: it can never come back.
        config: its policy.
        temperature: its own sampling temperature, which the engine divides by afterwards.
        held: whatever must stay alive while the key is in use (keys may be object identities).
        identity: the id that the check of requests gave it, if it was checked.
        outputs: the runner's own list of its output tokens, where the runner shows it (V1).
    """

    key: Hashable
    config: ReSETConfig
    temperature: float
    held: Any = None
    identity: str | None = None
    outputs: Sequence[int] = ()
    slot: int = -1
    next_position: int = -1
    """Set when it leaves: how many output tokens it had; with drafts, at most."""
    is_told: bool = False
    """The log has its figures already."""


class SlotPool:
    """Slots 0 .. count-1 of a tracker.

    Args:
        running: how many requests may run at once.
        parked: how many requests that left are remembered at least.
    """

    def __init__(self, running: int, parked: int) -> None:
        self.count = running + parked
        self._free = list(range(self.count - 1, -1, -1))
        self._away: OrderedDict[Tracked, None] = OrderedDict()  # the longest away first

    def admit(self, request: Tracked) -> None:
        """Give a new request a slot; its history there is the caller's to clear."""
        if not self._free:
            longest_away, _ = self._away.popitem(last=False)
            self._free.append(longest_away.slot)
            longest_away.slot = -1
        request.slot = self._free.pop()

    def leave(self, request: Tracked) -> None:
        """The request left the batch; it keeps its slot until others need it."""
        if request.key is None:
            self._free.append(request.slot)
            request.slot = -1
        else:
            self._away[request] = None

    def away(self, key: Hashable) -> list[Tracked]:
        """Requests with this key that left and still have their slot; none for key None."""
        return [] if key is None else [request for request in self._away if request.key == key]

    def come_back(self, request: Tracked) -> None:
        """A request that is away is in the batch again."""
        del self._away[request]
