"""Answers decoded by transformers, one at a time, each with its own seed.

One at a time, since the rows of a batch share one random generator and, by padding, their rounding:
an answer would depend on its neighbours. Use vLLM for speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from reset.calibrate import folder_sha256
from reset.evaluate.engines import Request
from reset.evaluate.engines.chat import (
    check_thinking,
    prompt_ids,
    prompt_text,
    template_sha256,
)
from reset.evaluate.problems import Answer

if TYPE_CHECKING:
    from reset.engine import Engine as LoadedModel


class TransformersEngine:
    """A model loaded by `reset.engine`.

    Args:
        model: folder or hub name.
        device, dtype, activations: as `reset.engine.load_engine`.
        thinking: switch of the chat template; None leaves it alone.
        needs_nvfp4: refuse a checkpoint that is not NVFP4.

    Raises:
        ValueError, OSError: as `load_engine`; the template has no thinking switch; not NVFP4.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "cpu",
        dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
        activations: Literal["checkpoint", "none", "nvfp4"] = "checkpoint",
        thinking: bool | None = None,
        needs_nvfp4: bool = False,
    ) -> None:
        from reset.engine import load_engine, package_versions

        self._engine = load_engine(model, device=device, dtype=dtype, activations=activations)
        check_thinking(self._engine.tokenizer, thinking)
        if needs_nvfp4 and self._engine.quantisation["format"] == "none":
            raise ValueError(
                f"{model} is not an NVFP4 checkpoint, so --backend nvfp4r has nothing to do; make "
                "one with reset-quantize, or leave the flag out"
            )
        self._thinking = thinking
        self._about = {
            "name": "transformers",
            "model": model,
            "model_sha256": folder_sha256(self._engine.folder),
            "quantisation": self._engine.quantisation,
            "device": device,
            "dtype": dtype,
            "thinking": thinking,
            "chat_template_sha256": template_sha256(self._engine.tokenizer),
            "versions": package_versions(),
        }

    @property
    def loaded(self) -> LoadedModel:
        """The model itself, for those who need more of it than answers."""
        return self._engine

    def describe(self) -> dict[str, Any]:
        return self._about

    def render(self, request: Request) -> str:
        return prompt_text(self._engine.tokenizer, request, self._thinking)

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        for position, request in enumerate(requests):
            yield position, self._answer(request)

    def _answer(self, request: Request) -> Answer:
        import torch
        from transformers import GenerationConfig

        from reset.hf import ReSETLogitsProcessor, sampling_arguments

        engine = self._engine
        tokenizer, ends = engine.tokenizer, engine.eos_token_ids
        ids = torch.tensor(
            [prompt_ids(tokenizer, self.render(request))], device=engine.model.device
        )
        # Fields left out come from the model's own configuration: name those that touch logits.
        config = GenerationConfig(
            **sampling_arguments(top_p=request.top_p, max_new_tokens=request.max_tokens),
            min_p=request.min_p or None,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            eos_token_id=ends or None,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        )
        torch.manual_seed(request.seed)
        sequences = engine.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            logits_processor=[ReSETLogitsProcessor(request.config, tokenizer, eos_token_id=ends)],
        )
        output = sequences[0, ids.shape[1] :].tolist()
        text = tokenizer.decode(
            output, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return Answer(text, "stop" if output[-1] in ends else "length", len(output))
