"""What the engine says about ReSET: one line when a request joins or leaves, and counters.

Lines are written at debug level only; the numbers travel to the host without anyone waiting for
them. Needs no vLLM.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from reset.tracker import RequestTracker
from reset.vllm.slots import Tracked

# A child of vLLM's logger: its level and format are those of the server (VLLM_LOGGING_LEVEL).
logger = logging.getLogger("vllm.reset")


class RequestLog:
    """Lines about requests.

    Args:
        tracker: its last slot is used as scratch space and belongs to no request.
        scratch: that slot.
        has_drafts: the host does not know how many tokens of the last call were kept.
    """

    def __init__(self, tracker: RequestTracker, scratch: int, has_drafts: bool = False) -> None:
        self._has_drafts = has_drafts
        self._tracker = tracker
        self._scratch = scratch
        self._underway: list[tuple[Tracked, Tensor, Any]] = []
        self._said_temperature = False

    @property
    def is_on(self) -> bool:
        """True if lines about requests are written at all."""
        return logger.isEnabledFor(logging.DEBUG)

    def joined(self, request: Tracked) -> None:
        """A request starts, without a history."""
        if request.temperature != 1.0 and not self._said_temperature:
            self._said_temperature = True
            logger.info(
                "reset: a request's own temperature (here %g) is cancelled where ReSET is on; "
                "T_low and T_high are the temperatures",
                request.temperature,
            )
        logger.debug("reset: request joined, slot %d, %s", request.slot, request.config)

    def left(self, request: Tracked) -> None:
        """A request finished or was preempted, with `next_position` output tokens."""
        if not self.is_on or request.is_told:
            return
        request.is_told = True
        # The history lacks the rows of the last call, as nobody has said that they stand. A copy
        # of the slot is told so; the slot itself stays as it is, since the request may come back.
        slot = request.slot
        if request.next_position > 0 and not self._has_drafts:
            self._tracker.copy([slot], [self._scratch])
            slot, device = self._scratch, self._tracker.device
            index = torch.full((1,), slot, dtype=torch.int64, device=device)
            position = torch.full((1,), request.next_position, dtype=torch.int64, device=device)
            self._tracker.decide(torch.zeros(1, device=device), index, position * 0, position)
        figures = self._tracker.summary()[slot].clone()
        event = None
        if figures.device.type == "cuda":
            host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            figures = host.copy_(figures, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._underway.append((request, figures, event))
        self.write()

    def write(self) -> None:
        """Write the lines whose numbers have arrived; called once a step."""
        while self._underway:
            request, figures, event = self._underway[0]
            if event is not None and not event.query():
                return
            del self._underway[0]
            logger.debug("reset: request left, %s; %s", describe(figures.tolist()), request.config)


def describe(figures: list[float]) -> str:
    """Tokens, steps, share at T_high, mean entropy and losses, from a row of the summary."""
    tokens, ended, high, entropy, lost = figures
    if tokens == 0:
        return "0 tokens"
    whole = "history whole" if lost == 0 else f"history lost {int(lost)} time(s), counted since"
    return (
        f"{int(tokens)} tokens, {int(ended) + 1} steps, {high / tokens:.0%} at T_high, "
        f"mean entropy {entropy / tokens:.3f} nats, {whole}"
    )


@lru_cache(maxsize=1)
def request_counter() -> Any:
    """Counter `reset_requests_total` by state (on, off, refused), on the API server's /metrics.

    None where prometheus_client is not installed.
    """
    try:
        from prometheus_client import Counter
    except ImportError:
        return None
    return Counter("reset_requests", "Requests by what they say about ReSET", ["state"])
