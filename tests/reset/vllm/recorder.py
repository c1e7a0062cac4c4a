"""What vLLM loads for tests: ReSET that keeps its decisions, and a call of a rank that tells them.

Needs vLLM.
"""

from __future__ import annotations

import hashlib
from typing import Any

from reset.vllm.processor import ReSETLogitsProcessor


class Recorder(ReSETLogitsProcessor):
    """Keeps each decision by request and position."""

    def __init__(self, *arguments: Any) -> None:
        self.owners: dict[int, str] = {}
        self.records: dict[str, dict[int, list[float]]] = {}
        super().__init__(*arguments)

    def admitted(self, request: Any) -> None:
        self.owners[request.slot] = request.identity

    def decided(self, layout: Any, decision: Any) -> None:
        places = zip(layout.slots.tolist(), layout.position.tolist(), strict=True)
        for row, (slot, position) in enumerate(places):
            if slot >= 0:
                fields = [float(field[row]) for field in decision]
                self.records.setdefault(self.owners[slot], {})[position] = fields


class StateExtension:
    """Of vLLM's workers."""

    def reset_state(self) -> dict[str, Any]:
        """Decisions by request id, sums slot by slot, and a digest of all that the tracker holds.

        JSON keeps every bit of a float.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        (recorder,) = (
            one for one in runner.input_batch.logitsprocs.all if isinstance(one, Recorder)
        )
        held = recorder._tracker._records.cpu().contiguous().numpy()
        return {
            "records": recorder.records,
            "summary": recorder._tracker.summary().tolist(),
            "digest": hashlib.sha256(held.tobytes()).hexdigest(),
        }
