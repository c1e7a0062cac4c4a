"""Stand-ins for vLLM's two runners, as far as a logits processor sees them.

They follow vLLM's own bookkeeping: V1 fills holes from the lowest, condenses from the end and swaps
rows; V2 hands out the slot freed last and reorders rows at every step.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import torch

from reset.tracker import RequestTracker
from reset.vllm.slots import SlotPool, Tracked
from reset.vllm.v1 import Added, Moved, RowTable
from reset.vllm.v2 import SlotTable
from tests.reset.vllm.world import DETECTOR, VOCABULARY, Script, Step

CPU = torch.device("cpu")
PROMPT = 5  # tokens


class Recorded:
    """Temperatures by request and position; the last call for a position counts."""

    def __init__(self, scripts: dict[str, Script], parked: int = 8, rows: int = 1) -> None:
        self.scripts = scripts
        self.pool = SlotPool(running=4, parked=parked)
        self.tracker = RequestTracker(
            DETECTOR, self.pool.count, device="cpu", max_window=8, max_rows=rows
        )
        self.temperatures: dict[str, dict[int, float]] = {name: {} for name in scripts}
        self.kept = dict.fromkeys(scripts, 0)  # output tokens so far
        self.left: list[Tracked] = []
        self.random = random.Random(0)
        self.garbage = torch.Generator().manual_seed(1)

    def admit(self, requests: list[Tracked]) -> None:
        self.tracker.admit(
            [request.slot for request in requests],
            [request.config for request in requests],
            [request.temperature for request in requests],
            [() if -1 in request.outputs else request.outputs for request in requests],
        )

    def row_of(self, name: str, position: int, is_kept: bool = True) -> torch.Tensor:
        if is_kept and position < len(self.scripts[name].tokens):
            return self.scripts[name].logits[position]
        return torch.randn(len(VOCABULARY), generator=self.garbage)

    def scale(self, rows: list[tuple[str, int, bool]], layout) -> None:
        """Rows are (name, position, is kept); checks what becomes of the logits as well."""
        raw = torch.stack([self.row_of(*row) for row in rows])
        logits = raw.clone()
        if layout is None:
            assert all(self.scripts[name].config is None for name, _, _ in rows)
            return
        decision = self.tracker.scale(logits, *layout)
        for index, (name, position, is_kept) in enumerate(rows):
            script = self.scripts[name]
            if script.config is None:
                assert torch.equal(logits[index], raw[index])
            elif is_kept:
                temperature = float(decision.temperature[index])
                self.temperatures[name][position] = temperature
                # The engine divides by the request's own temperature afterwards.
                after = logits[index] / script.temperature
                assert torch.allclose(after, raw[index] / temperature, rtol=1e-5)

    def token(self, name: str, position: int) -> int:
        return self.scripts[name].tokens[position]

    def losses(self) -> float:
        return float(self.tracker.summary()[:, 4].sum())


class FakeV1(Recorded):
    """The persistent batch of the V1 runner.

    Under async scheduling the output lists end in -1; vLLM puts the tokens in right before sampling
    if it knows of the processor (`is_repaired`: loaded by name), and never if it does not (loaded
    by an entry point).
    """

    def __init__(
        self, scripts, *, is_async: bool, is_repaired: bool = True, parked: int = 8
    ) -> None:
        super().__init__(scripts, parked)
        self.is_async = is_async
        self.is_repaired = is_repaired
        self.rows: list[str | None] = []
        # vLLM hands over the same objects for a request, and for all requests of one prompt unless
        # they have a seed.
        owner = "group" if is_repaired else "name"
        self.identity = {name: getattr(script, owner) for name, script in scripts.items()}
        self.outputs: dict[str, list[int]] = {name: [] for name in scripts}
        self.table = RowTable(self.pool, CPU, self.admit, self.left.append)

    def step(self, step: Step) -> None:
        removed = [row for row, name in enumerate(self.rows) if name and name not in step.scheduled]
        for row in removed:
            self.rows[row] = None
        holes, added, moved = sorted(removed), [], []
        for name in step.scheduled:
            if name not in self.rows:
                if self.is_async and self.kept[name]:  # the real ids come from the scheduler
                    self.outputs[name] = self.scripts[name].tokens[: self.kept[name]]
                del self.outputs[name][self.kept[name] :]
                row = holes.pop(0) if holes else len(self.rows)
                self.rows[row : row + 1] = [name]
                added.append(Added(row, self.request(name)))
        while holes:
            last = max(row for row, name in enumerate(self.rows) if name) if any(self.rows) else -1
            if holes[0] >= last:
                break
            target = holes.pop(0)
            self.rows[target], self.rows[last] = self.rows[last], None
            moved.append(Moved(last, target, is_swap=False))
        self.rows = [name for name in self.rows if name]
        if len(self.rows) > 1 and self.random.random() < 0.5:
            one, two = self.random.sample(range(len(self.rows)), 2)
            self.rows[one], self.rows[two] = self.rows[two], self.rows[one]
            moved.append(Moved(one, two, is_swap=True))
        if removed or added or moved:
            self.table.update(holes, added, moved, len(self.rows))
        if self.rows:
            self.run(step)

    def request(self, name: str) -> Tracked | None:
        script = self.scripts[name]
        if script.config is None:
            return None
        key = self.identity[name]
        return Tracked(key, script.config, script.temperature, outputs=self.outputs[name])

    def run(self, step: Step) -> None:
        if self.is_repaired:
            for name in self.rows:
                self.outputs[name][:] = self.scripts[name].tokens[: self.kept[name]]
        layout = self.table.layout()
        rows = [(name, self.kept[name], step.scheduled[name]) for name in self.rows]
        self.scale(rows, layout)
        sampled = []
        for name, position, is_kept in rows:
            sampled.append(self.token(name, position) if is_kept else self.random.randrange(8))
            if is_kept:
                self.kept[name] += 1
                self.outputs[name].append(-1 if self.is_async else sampled[-1])
        self.table.sampled(torch.tensor(sampled, dtype=torch.int32).unsqueeze(1))


class FakeV2(Recorded):
    """Request slots of the V2 runner; `drafts` tokens of speculation per request and step."""

    def __init__(self, scripts, *, drafts: int = 0, parked: int = 8) -> None:
        super().__init__(scripts, parked, rows=1 + drafts)
        self.drafts = drafts
        self.free = list(range(4))
        self.slot: dict[str, int] = {}
        self.fill: dict[str, int] = {}
        self.table = SlotTable(self.pool, 4, CPU, self.admit, self.left.append, drafts)

    def step(self, step: Step) -> None:
        for name in [*step.finished, *step.preempted]:
            self.free.append(self.slot.pop(name))
        for name in step.scheduled:
            if name in self.slot:
                continue
            index = self.slot[name] = self.free.pop()
            script = self.scripts[name]
            self.fill[name] = PROMPT + self.kept[name]
            request = None
            if script.config is not None:  # with a seed, each request has a key of its own
                request = Tracked((script.group, name), script.config, script.temperature)
            self.table.add(index, request, PROMPT, self.fill[name])
        self.table.flush()
        if step.scheduled:
            self.run(step)

    def run(self, step: Step) -> None:
        names = list(step.scheduled)
        if self.random.random() < 0.5:
            self.random.shuffle(names)
        rows, tokens, positions, owners, lengths = [], [], [], [], []
        for name in names:
            is_kept, kept = step.scheduled[name], self.kept[name]
            length = PROMPT + kept if is_kept else self.random.randint(1, self.fill[name] - 1)
            lengths.append(length)
            right = is_kept
            for draft in range(1 + (self.drafts if is_kept else 0)):
                position = kept + draft
                fed = self.random.randrange(8)
                if position > 0 and position <= len(self.scripts[name].tokens):
                    truth = self.token(name, position - 1)
                    # Drafts are right more often than not; once wrong, the rest is thrown away.
                    if draft == 0 or (right and self.random.random() < 0.6):
                        fed = truth
                    right = right and fed == truth
                right = right and position < len(self.scripts[name].tokens)
                rows.append((name, position, right))
                tokens.append(fed)
                positions.append(length - 1 + draft)
                owners.append(self.slot[name])
                if right:
                    self.kept[name] += 1
        context = SimpleNamespace(
            idx_mapping_np=np.array([self.slot[name] for name in names], dtype=np.int32),
            seq_lens_upper_bound_np=np.array(lengths, dtype=np.int32) + self.drafts,
            expanded_idx_mapping=torch.tensor(owners, dtype=torch.int32),
            pos=torch.tensor(positions),
            input_ids=torch.tensor(tokens, dtype=torch.int32),
        )
        self.scale(rows, self.table.layout(context))
