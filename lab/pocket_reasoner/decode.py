"""Thousands of short answers at once, each as if it were alone: an engine for `reset.evaluate`.

One step moves every row on by one token, whether it is still reading its prompt or already writing;
a row that has finished takes the next request. On a GPU the step is one CUDA graph, replayed. An
answer depends on its own request (seed and policy included), not on its neighbours: random numbers
are the row's own, the batch keeps its shape, and the policy's state is one slot a row.

Knows Qwen3's forward pass (forward.py) and the core of `reset`; knows no tasks and no grades.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lab.pocket_reasoner.forward import StepCache, step_logits
from lab.pocket_reasoner.sampling import draw, uniform
from reset import StepDetector, TemperaturePolicy, scale_logits
from reset.calibrate import folder_sha256
from reset.config import ReSETConfig
from reset.engine import DtypeName, is_nvfp4, package_versions
from reset.evaluate.engines import Request
from reset.evaluate.engines.chat import prompt_ids, prompt_text
from reset.evaluate.problems import Answer

_STEPS_BETWEEN_LOOKS = 16
"""The host looks for finished rows this often; a finished row idles until then."""


@dataclass(frozen=True)
class Decoded:
    """One answer: its tokens, the one that ended it included, and H_t of each in nats."""

    ids: tuple[int, ...]
    ended: bool
    entropy_nats: tuple[float, ...]


def load_model(folder: Path, device: str, dtype: torch.dtype) -> Any:
    """A model folder, NVFP4 or not, in eval mode.

    NVFP4 layers stay unpacked: their kernels are for small batches, and the dequantised matrices
    give the same products (tests of `nvfp4r` hold them together).

    Raises:
        ValueError, OSError: the folder is no usable model.
    """
    if is_nvfp4(folder):
        from nvfp4r import hf

        return hf.load_model(folder, device=device, dtype=dtype, packed=False)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map={"": device})
    return model.eval()


class BatchEngine:
    """Decodes requests in a batch of a fixed number of rows.

    Args:
        model: a Qwen3ForCausalLM of transformers in eval mode, NVFP4 layers or not.
        tokenizer: the model's.
        rows: answers at once. Memory: forward.StepCache.
        graphs: on CUDA, replay one captured step instead of launching its kernels one by one.
        about: what `describe` says beside rows and versions.

    Raises:
        ValueError: rows below 1, or another architecture.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        rows: int,
        graphs: bool = True,
        about: dict[str, Any] | None = None,
    ) -> None:
        if rows < 1:
            raise ValueError(f"rows is {rows}; at least 1 answer must be decoded at once")
        if model.config.model_type != "qwen3":
            raise ValueError(
                f"this is a {model.config.model_type} model, but this decoder knows the "
                "architecture qwen3 alone; use reset-run for others"
            )
        self.model, self.tokenizer, self.rows = model, tokenizer, rows
        self.graphs = graphs
        self._detector = StepDetector.from_tokenizer(tokenizer, vocab_size=model.config.vocab_size)
        self._about = {
            "name": "lab.pocket_reasoner.decode",
            "rows": rows,
            "versions": package_versions(),
            **(about or {}),
        }

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        rows: int,
        device: str = "cpu",
        dtype: DtypeName = "float32",
        graphs: bool = True,
    ) -> BatchEngine:
        """The engine of a model folder.

        Raises:
            ValueError, OSError: as `load_model` and the class itself.
        """
        from transformers import AutoTokenizer

        about = {
            "model": folder.name,
            "model_sha256": folder_sha256(folder),
            "device": device,
            "dtype": dtype,
        }
        model = load_model(folder, device, getattr(torch, dtype))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return cls(model, tokenizer, rows=rows, graphs=graphs, about=about)

    def describe(self) -> dict[str, Any]:
        return self._about

    def render(self, request: Request) -> str:
        return prompt_text(self.tokenizer, request, None)

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        for index, decoded in self.decode(requests):
            text = self.tokenizer.decode(decoded.ids, skip_special_tokens=True)
            reason: Literal["stop", "length"] = "stop" if decoded.ended else "length"
            yield index, Answer(text, reason, len(decoded.ids))

    @torch.inference_mode()
    def decode(
        self, requests: Sequence[Request], progress: Callable[[int], None] | None = None
    ) -> Iterator[tuple[int, Decoded]]:
        """Position in `requests` and what was decoded, in the order in which they finish.

        Args:
            requests: min_p is not supported and must be 0.
            progress: called now and then with how many answers are there.

        Raises:
            ValueError: a request needs more positions than the model has, asks for min-p, or its
                logits turn NaN.
        """
        if not requests:
            return
        asked = {request.messages: request for request in requests}  # many samples, few prompts
        ids = {
            messages: prompt_ids(self.tokenizer, self.render(request))
            for messages, request in asked.items()
        }
        prompts = [ids[request.messages] for request in requests]
        self._check(requests, prompts)
        batch = _Batch(
            self.model, self._detector, self._end, requests, prompts, self.rows, self.graphs
        )
        waiting = iter(range(len(requests)))
        running: dict[int, int] = {}  # row -> request
        finished: list[tuple[int, Decoded]] = []
        done = 0
        while True:
            free = [row for row in range(self.rows) if row not in running]
            taken = dict(zip(free, waiting, strict=False))
            if taken:
                batch.admit(taken)
                running |= taken
            if running:
                batch.advance()
            # While a GPU works on that, the caller works on what came before.
            for number, decoded in finished:
                yield number, decoded
                done += 1
            if progress is not None:
                progress(done)
            if not running:
                return
            finished = [
                (running.pop(row), decoded) for row, decoded in batch.finished(sorted(running))
            ]

    @property
    def _end(self) -> int:
        return int(self.tokenizer.eos_token_id)

    def _check(self, requests: Sequence[Request], prompts: Sequence[list[int]]) -> None:
        most = self.model.config.max_position_embeddings
        for number, (request, ids) in enumerate(zip(requests, prompts, strict=True)):
            if len(ids) + request.max_tokens > most:
                raise ValueError(
                    f"request {number}: {len(ids)} prompt tokens and max_tokens "
                    f"{request.max_tokens} exceed the {most} positions of the model; lower "
                    "max_tokens"
                )
            if request.min_p:
                raise ValueError(f"request {number}: min_p is {request.min_p}; need 0 here")


class _Batch:
    """State of all rows on the device, and the step that moves them on."""

    def __init__(
        self,
        model: Any,
        detector: StepDetector,
        end: int,
        requests: Sequence[Request],
        prompts: Sequence[list[int]],
        rows: int,
        graphs: bool,
    ) -> None:
        self._model, self._end = model, end
        self._graphs = graphs
        self._requests, self._prompts = requests, prompts
        self._device = model.model.embed_tokens.weight.device
        self._detector = detector.to(self._device)
        width = max(map(len, prompts))
        most = max(request.max_tokens for request in requests)
        self._cache = StepCache(model, rows, width + most)
        configs = [request.config for request in requests]
        # Slots rows .. 2 rows - 1 take in what rows see while they read their prompts.
        self._policy = TemperaturePolicy(
            configs[0], 2 * rows, self._device, max(config.window for config in configs)
        )
        self._index = torch.arange(rows, device=self._device)
        self._prompt = self._zeros(rows, width)
        self._output = self._zeros(rows, most)
        self._entropy = torch.zeros((rows, most), dtype=torch.float32, device=self._device)
        self._top_p = torch.ones(rows, dtype=torch.float64, device=self._device)
        self._prompt_length, self._limit, self._seed = (self._zeros(rows) for _ in range(3))
        self._token, self._position, self._count, self._state = (
            self._zeros(rows) for _ in range(4)
        )
        self._new_step, self._active, self._ended, self._bad = (
            torch.zeros(rows, dtype=torch.bool, device=self._device) for _ in range(4)
        )
        self._graph: Any = None

    def admit(self, taken: dict[int, int]) -> None:
        """Put requests into free rows: {row: request}."""
        by_config: dict[ReSETConfig, list[int]] = {}
        for row, number in taken.items():
            by_config.setdefault(self._requests[number].config, []).append(row)
        for config, slots in by_config.items():
            self._policy.configure(config, slots)
        rows = torch.tensor(list(taken), device=self._device)
        prompts = [self._prompts[number] for number in taken.values()]
        width = self._prompt.shape[1]
        padded = [ids + [0] * (width - len(ids)) for ids in prompts]
        requests = [self._requests[number] for number in taken.values()]

        def put(target: Tensor, values: Any) -> None:
            target[rows] = torch.tensor(values, dtype=target.dtype, device=self._device)

        put(self._prompt, padded)
        put(self._prompt_length, [len(ids) for ids in prompts])
        put(self._token, [ids[0] for ids in prompts])
        put(self._limit, [request.max_tokens for request in requests])
        put(self._seed, [request.seed for request in requests])
        put(self._top_p, [request.top_p for request in requests])
        for state in (self._position, self._count, self._state, self._new_step, self._ended):
            state[rows] = 0
        self._active[rows] = True

    def advance(self) -> None:
        """A few steps for all rows; a GPU is not waited for."""
        for _ in range(_STEPS_BETWEEN_LOOKS):
            self._replay()

    def finished(self, running: list[int]) -> list[tuple[int, Decoded]]:
        """The rows among `running` that have finished, once the device is ready.

        Raises:
            ValueError: a row's logits hold NaN or +inf.
        """
        facts = torch.stack([self._active, self._bad, self._ended, self._count]).tolist()
        active, bad, ended, count = facts
        if any(bad):
            raise ValueError(
                f"row {bad.index(1)}: logits hold NaN or +inf, so no token can be drawn; check the "
                "checkpoint (nvfp4r inspect) and the dtype"
            )
        finished = [row for row in running if not active[row]]
        if not finished:
            return []
        rows = torch.tensor(finished, device=self._device)
        ids, entropies = self._output[rows].tolist(), self._entropy[rows].tolist()
        return [
            (row, Decoded(tuple(ids[i][: count[row]]), bool(ended[row]), tuple(e[: count[row]])))
            for i, (row, e) in enumerate(zip(finished, entropies, strict=True))
        ]

    def _replay(self) -> None:
        if self._device.type != "cuda" or not self._graphs:
            self._step()
            return
        if self._graph is None:
            # The first steps compile kernels and reserve their scratch; they count like any other.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._step()
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._step()
        self._graph.replay()

    def _step(self) -> None:
        """One token further in every row; writes to what `__init__` made, allocates no state."""
        logits = step_logits(self._model, self._cache, self._token, self._position).float()
        writing = self._active & (self._position >= self._prompt_length - 1)
        slots = torch.where(writing, self._index, self._index + len(self._index))
        decision = scale_logits(logits, self._policy, self._new_step, slots)
        drawn = draw(logits, self._top_p, uniform(self._seed, self._count))
        self._bad |= writing & decision.temperature.isnan()

        place = self._count.clamp(max=self._output.shape[1] - 1)
        for target, value in ((self._output, drawn), (self._entropy, decision.entropy.float())):
            kept = target[self._index, place]
            target[self._index, place] = torch.where(writing, value, kept)
        state, ends_step = self._detector.advance(self._state, drawn)
        self._state.copy_(torch.where(writing, state, self._state))
        self._new_step.copy_(writing & ends_step)
        self._count += writing
        self._ended.copy_(torch.where(writing, drawn == self._end, self._ended))
        self._active &= ~(writing & ((drawn == self._end) | (self._count >= self._limit)))

        following = (self._position + 1).clamp(max=self._prompt.shape[1] - 1)
        read = self._prompt[self._index, following]
        self._token.copy_(torch.where(writing, drawn, read))
        # An idle row attends to its first cell alone, which costs least.
        self._position.add_(1).mul_(self._active)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self._device)
