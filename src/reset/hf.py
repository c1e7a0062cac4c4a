"""ReSET for Hugging Face transformers: a logits processor for `model.generate`.

Knows how generate() calls a processor: rows, padding, finished rows. The policy itself is
`reset.policy`; the sampling stays with transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from reset.config import ReSETConfig
from reset.policy import TemperaturePolicy
from reset.recorder import Recorder
from reset.sampler import scale_logits
from reset.steps import StepDetector
from reset.trace.record import TokenTrace

_NOT_RECORDED = "nothing was recorded; build with record=True and call generate()"


class ReSETLogitsProcessor(LogitsProcessor):
    """Divides each row's logits by its step-aware temperature.

    Rows are independent: batches, left padding and `num_return_sequences` need nothing special.
    Each call must bring the previous call's ids and one new token per row; any other ids start a
    new batch with empty history, so one object can serve call after call. Ids of the first call are
    the prompt and never count. A row is finished once it has produced an `eos_token_id`; what
    generate() pads it with is ignored.

    It must be the only temperature: pass `temperature=1.0` and the top-k you want to generate()
    (`sampling_arguments` does), or the model's own generation_config scales the logits again.
    transformers runs its penalties before this processor, so they are part of the "raw" logits,
    and temperature, top-k, top-p and min-p after it.

    Not supported: beam search (refused) and assisted decoding, which call a processor for rows
    that do not grow by one token.

    Args:
        config: the policy of every row.
        tokenizer: the model's tokenizer, or a `StepDetector` made from it.
        eos_token_id: ids that finish a row; default: the tokenizer's. Pass
            `model.generation_config.eos_token_id` where the model has more than one.
        record: keep the numbers of every token, for `traces`.
        alternatives: how many of the likeliest tokens `record` keeps.

    Raises:
        ValueError: the tokenizer cannot spell a blank line.

    Example:
        >>> processor = ReSETLogitsProcessor(ReSETConfig(t_low=0.1, tau_0=0.55), tokenizer)
        >>> arguments = sampling_arguments(max_new_tokens=8)
        >>> output = model.generate(**inputs, logits_processor=[processor], **arguments)
    """

    supports_continuous_batching = False  # rows there are not requests

    def __init__(
        self,
        config: ReSETConfig,
        tokenizer: Any,
        *,
        eos_token_id: int | Sequence[int] | None = None,
        record: bool = False,
        alternatives: int = 3,
    ) -> None:
        self.config = config
        if isinstance(tokenizer, StepDetector):
            self._detector = tokenizer
        else:
            self._detector = StepDetector.from_tokenizer(tokenizer)
            if eos_token_id is None:
                eos_token_id = tokenizer.eos_token_id
        if eos_token_id is None:
            eos_token_id = []
        self._eos = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
        self._record = record
        self._alternatives = alternatives
        self.reset()

    def reset(self) -> None:
        """Forget every row; the next call starts a new batch."""
        self._seen: Tensor | None = None  # [B, L] ids of the last call
        self._recorder: Recorder | None = None

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[B, V] float32: `scores` divided by each row's temperature; `scores` is not changed.

        Raises:
            ValueError: a row that is not finished has NaN or +inf logits, or rows were reordered.
        """
        if self._continues(input_ids):
            self._observe(input_ids[:, -1])
        else:
            self._begin(input_ids, scores)
        self._seen = input_ids
        scaled = scores.clone()
        decision = scale_logits(scaled, self._policy, self._new_step)
        bad = decision.temperature.isnan() & ~self._finished
        if bad.any():  # generate() itself waits for the device at every token
            row = int(bad.nonzero()[0])
            raise ValueError(
                f"row {row}: the logits at output position {self._position} hold NaN or +inf, so "
                "no token can be drawn. Check the checkpoint (nvfp4r inspect) and the dtype; "
                "float16 overflows on models trained in bfloat16"
            )
        if self._recorder is not None:
            self._recorder.add(scores, decision)
        self._position += 1
        return scaled

    def traces(self, sequences: Tensor, tokenizer: Any) -> list[tuple[TokenTrace, ...]]:
        """What happened to each row, up to and including the token that finished it.

        Args:
            sequences: [B, L] what generate() returned for the last batch.
            tokenizer: turns ids into text.

        Raises:
            RuntimeError: the processor was built without `record=True`, or has not run.
        """
        if self._recorder is None or self._seen is None:
            raise RuntimeError(_NOT_RECORDED)
        outputs = sequences[:, self._prompt_length :]
        return self._recorder.traces(outputs, tokenizer, self.output_lengths(sequences))

    def output_lengths(self, sequences: Tensor) -> list[int]:
        """Output tokens of each row of `sequences` [B, L], its finishing token included."""
        outputs = sequences[:, self._prompt_length :]
        ends = torch.isin(outputs, self._eos_ids)
        # A row without an end is as long as the batch.
        first = torch.where(ends.any(1), ends.int().argmax(1) + 1, outputs.shape[1])
        lengths: list[int] = first.tolist()
        return lengths

    def entropies(self, sequences: Tensor) -> list[Tensor]:
        """H_t of every output token, a float64 [T] per row, in nats, from the raw logits."""
        if self._recorder is None or self._seen is None:
            raise RuntimeError(_NOT_RECORDED)
        recorded = self._recorder.entropies()  # [T, B]
        return [recorded[:n, row] for row, n in enumerate(self.output_lengths(sequences))]

    def _begin(self, input_ids: Tensor, scores: Tensor) -> None:
        batch, device = scores.shape[0], scores.device
        self._detector = self._detector.padded_to(scores.shape[1]).to(device)
        self._policy = TemperaturePolicy(self.config, batch, device)
        self._state = self._detector.initial_state(batch)
        self._new_step = torch.zeros(batch, dtype=torch.bool, device=device)
        self._finished = torch.zeros(batch, dtype=torch.bool, device=device)
        self._eos_ids = torch.tensor(self._eos, dtype=torch.int64, device=device)
        self._prompt_length = input_ids.shape[1]
        self._position = 0
        self._recorder = Recorder(self._detector, self._alternatives) if self._record else None

    def _observe(self, token: Tensor) -> None:
        """Take in the token [B] that was drawn from the last call's logits."""
        self._state, self._new_step = self._detector.advance(self._state, token)
        self._finished |= torch.isin(token, self._eos_ids)
        if self._recorder is not None:
            self._recorder.drew(token)

    def _continues(self, input_ids: Tensor) -> bool:
        """True if `input_ids` are the last call's ids with one more token per row."""
        seen = self._seen
        if seen is None or input_ids.shape != (seen.shape[0], seen.shape[1] + 1):
            return False
        prefix = input_ids[:, :-1]
        if torch.equal(prefix, seen):
            return True
        same = (prefix.unsqueeze(1) == seen.unsqueeze(0)).all(-1)  # [B, B]
        if same.any(1).all():
            raise ValueError(
                "the rows of the batch were reordered between two tokens, as beam search does; "
                "ReSET keeps a history per row. Use num_beams=1 with do_sample=True"
            )
        return False


def sampling_arguments(top_p: float = 0.95, **others: Any) -> dict[str, Any]:
    """Arguments for generate() under which ReSET's temperature is the only one.

    Example:
        >>> sampling_arguments(max_new_tokens=512)["temperature"]
        1.0
    """
    return {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": top_p, **others}
