"""The logits processor that vLLM loads: `--logits-processors reset.vllm:ReSETLogitsProcessor`.

One class for both of vLLM's interfaces. Knows how each runner calls it, and nothing of the policy:
rows and positions come from `reset.vllm.v1` or `reset.vllm.v2`, the rest is `reset.tracker`.
"""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor as V1Interface
from vllm.v1.sample.logits_processor import MoveDirectionality
from vllm.v1.sample.sampler import Sampler

from reset.config import ReSETConfig
from reset.policy import Decision
from reset.steps import StepDetector
from reset.tracker import RequestTracker
from reset.vllm.log import RequestLog, logger, request_counter
from reset.vllm.options import (
    IGNORED_KEYS,
    MAX_WINDOW,
    REQUEST_ID,
    request_config,
    server_options,
)
from reset.vllm.slots import SlotPool, Tracked
from reset.vllm.v1 import Added, Layout, Moved, RowTable
from reset.vllm.v2 import SlotTable

try:  # vLLM >= 0.31
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2Interface
except ImportError:
    _INTERFACES: tuple[type, ...] = (V1Interface,)
else:
    _INTERFACES = (V1Interface, V2Interface)

_MOST_PARKED = 64  # requests that left and are remembered; each holds its token lists alive


class ReSETLogitsProcessor(*_INTERFACES):  # type: ignore[misc]
    """Divides each request's logits by its step-aware temperature; docs/vllm.md tells the rest.

    Does nothing to a request unless the request or the server's defaults switch it on; then its own
    temperature is cancelled, unless it is 0: a greedy request is left alone, bit for bit.

    Raises:
        ValueError: speculative decoding on the V1 runner, an engine without a tokenizer, or bad
            server defaults, when the engine starts.
    """

    def __init__(self, vllm_config: Any, *arguments: Any) -> None:
        # V1: (device, is_pin_memory). V2: (req_states,).
        more = vllm_config.additional_config
        self._server = server_options(os.environ, more if isinstance(more, Mapping) else {})
        self._is_v2 = len(arguments) == 1
        drafts = 0
        if vllm_config.speculative_config is not None:
            if not self._is_v2:
                raise ValueError(
                    "ReSET cannot run with speculative decoding on vLLM's V1 runner, which does "
                    "not call logits processors for draft tokens; use the V2 runner (vLLM >= 0.31 "
                    "without VLLM_USE_V2_MODEL_RUNNER=0), or start without a speculative config"
                )
            drafts = vllm_config.speculative_config.num_speculative_tokens
        running = vllm_config.scheduler_config.max_num_seqs
        self._states: Any = arguments[0] if self._is_v2 else None
        device = arguments[0].device if self._is_v2 else torch.device(arguments[0])
        if self._is_v2:
            running = arguments[0].max_num_reqs
        pool = SlotPool(running, parked=min(running, _MOST_PARKED))
        width = vllm_config.model_config.get_vocab_size()
        self._tracker = RequestTracker(
            self._detector(vllm_config.model_config, width),
            pool.count + 1,  # one to spare for the log
            device=device,
            max_window=MAX_WINDOW,
            max_rows=1 + drafts,
        )
        self._log = RequestLog(self._tracker, scratch=pool.count, has_drafts=drafts > 0)
        self._warned_ignored = False
        self._table: Any
        if self._is_v2:
            self._table = SlotTable(pool, running, device, self._admit, self._log.left, drafts)
        else:
            self._table = RowTable(pool, device, self._admit, self._log.left)
            _hand_over_samples()
        self._warm_up(width)
        state = "on for every request that does not switch it off"
        if self._server.defaults is None:
            state = "on for requests that switch it on"
        logger.info(
            "reset: ready on the %s runner, %s; %s",
            "V2" if self._is_v2 else "V1",
            self._tracker.backend,
            state,
        )

    # -- both interfaces --------------------------------------------------------------------------

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Check a request; runs where requests arrive, which need not be the engine's process.

        Raises:
            ValueError: names the field; vLLM answers with HTTP 400.
        """
        counter = request_counter()
        try:
            config = request_config(
                sampling_params.extra_args, sampling_params.temperature, server_options(os.environ)
            )
        except ValueError:
            if counter is not None:
                counter.labels("refused").inc()
            raise
        if counter is not None:
            counter.labels("off" if config is None else "on").inc()
        # The V2 runner shows no request ids; this one survives a preemption. A new dictionary: the
        # caller's own may be shared with other requests.
        sampling_params.extra_args = {
            **(sampling_params.extra_args or {}),
            REQUEST_ID: uuid.uuid4().hex,
        }

    def is_argmax_invariant(self) -> bool:
        """False: vLLM then calls it before temperature and truncation, on raw logits."""
        return False

    def apply(self, logits: Tensor, context: Any = None) -> Tensor:
        """Scale the rows of requests that ReSET works on, in place."""
        layout = self._table.layout() if context is None else self._table.layout(context)
        if layout is not None:
            self.decided(layout, self._tracker.scale(logits, *layout))
        return logits

    def decided(self, layout: Layout, decision: Decision) -> None:
        """Called with every decision, tensors of the device; for subclasses that record."""

    def admitted(self, request: Tracked) -> None:
        """Called with every request that gets a slot, before its first row; for subclasses."""

    # -- V1 ---------------------------------------------------------------------------------------

    def update_state(self, batch_update: Any) -> None:
        """Requests that left, entered or moved; None if there are none."""
        self._log.write()
        if batch_update is None:
            return
        added = []
        for row, sampling_params, prompt, outputs in batch_update.added:
            key = (id(sampling_params), id(prompt))
            request = self._request(sampling_params, key, (sampling_params, prompt), outputs)
            added.append(Added(row, request))
        moved = [
            Moved(source, target, direction == MoveDirectionality.SWAP)
            for source, target, direction in batch_update.moved
        ]
        self._table.update(batch_update.removed, added, moved, batch_update.batch_size)

    def after_sample(self, token: Tensor) -> None:
        """The tokens [R, 1] that the V1 sampler drew for the rows of the last `apply`."""
        if not self._is_v2:
            self._table.sampled(token)

    # -- V2 ---------------------------------------------------------------------------------------

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """A request enters a slot; False if ReSET leaves it alone."""
        identity = (sampling_params.extra_args or {}).get(REQUEST_ID)
        # Requests of one prompt (n > 1) share the id; with a seed, each has its own.
        key = None if identity is None else (identity, sampling_params.seed)
        request = self._request(sampling_params, key)
        prompt_length = int(self._states.prompt_len.np[req_idx])
        fill_length = int(self._states.prefill_len.np[req_idx])
        self._table.add(req_idx, request, prompt_length, fill_length)
        return request is not None

    def apply_staged_writes(self) -> None:
        """Send what `add_request` changed to the device; once a step."""
        self._log.write()
        if self._log.is_on:
            self._table.tell_absent()
        self._table.flush()

    # -- inside -----------------------------------------------------------------------------------

    def _request(
        self, sampling_params: Any, key: Any, held: Any = None, outputs: Sequence[int] = ()
    ) -> Tracked | None:
        sent = sampling_params.extra_args
        if sent and not self._warned_ignored and any(name in sent for name in IGNORED_KEYS):
            self._warned_ignored = True
            logger.warning(
                "reset: %s are ignored; the engine finds newlines itself",
                " and ".join(IGNORED_KEYS),
            )
        config = self._config(sampling_params)
        if config is None:
            return None
        identity = (sent or {}).get(REQUEST_ID)
        return Tracked(key, config, sampling_params.temperature, held, identity, outputs)

    def _config(self, sampling_params: Any) -> ReSETConfig | None:
        try:
            return request_config(
                sampling_params.extra_args, sampling_params.temperature, self._server
            )
        except ValueError as error:
            # Checked where it arrived, but with other defaults: an exception here would end the
            # engine and every other request with it.
            logger.error("reset: a request is served without ReSET: %s", error)
            return None

    def _admit(self, requests: list[Tracked]) -> None:
        # Requests whose history is gone bring their outputs; -1 is what vLLM does not know yet.
        outputs = [() if -1 in request.outputs else request.outputs for request in requests]
        self._tracker.admit(
            [request.slot for request in requests],
            [request.config for request in requests],
            [request.temperature for request in requests],
            outputs,
        )
        for request in requests:
            self._log.joined(request)
            self.admitted(request)

    def _detector(self, model_config: Any, width: int) -> StepDetector:
        if self._server.tokenizer is not None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(
                self._server.tokenizer, trust_remote_code=model_config.trust_remote_code
            )
        else:
            from vllm.tokenizers.registry import cached_tokenizer_from_config

            tokenizer = cached_tokenizer_from_config(model_config)
        if tokenizer is None:
            raise ValueError(
                "the engine runs without a tokenizer (skip_tokenizer_init), so ReSET cannot find "
                'step borders; add "tokenizer": FOLDER to RESET_DEFAULTS or to --additional-config '
                '"reset", or start the engine without reset.vllm:ReSETLogitsProcessor'
            )
        return StepDetector.from_tokenizer(tokenizer, vocab_size=width)

    def _warm_up(self, width: int) -> None:
        """Compile the kernels before the first request: with rows that belong to nobody."""
        device = self._tracker.device
        if device.type != "cuda":
            return
        for rows in (1, 2, 16):  # Triton compiles 1, multiples of 16 and the rest separately
            none = torch.full((rows,), -1, device=device)
            logits = torch.zeros((rows, width), device=device)
            for index_type in (torch.int32, torch.int64):
                self._tracker.scale(logits, none, none.to(index_type), none)


def _hand_over_samples() -> None:
    """Let the V1 sampler give processors the tokens it drew, on the device.

    The interface has no such call, and the output lists hold placeholders under async scheduling
    (which also costs a wait per step to repair). Wrapped once per process.
    """
    original = Sampler.forward
    if hasattr(original, "hands_over_samples"):
        return

    @functools.wraps(original)
    def forward(
        self: Any, logits: Tensor, sampling_metadata: Any, *arguments: Any, **options: Any
    ) -> Any:
        output = original(self, logits, sampling_metadata, *arguments, **options)
        for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
            if isinstance(processor, ReSETLogitsProcessor):
                processor.after_sample(output.sampled_token_ids)
        return output

    forward.hands_over_samples = True  # type: ignore[attr-defined]
    Sampler.forward = forward


class ReSETAdapter(ReSETLogitsProcessor):
    """The same, under the name that scripts for the public reference import."""
