"""Answers decoded by vLLM in this process, many at once, each with its own seed and policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any, Literal

from reset.calibrate import folder_sha256
from reset.evaluate.engines import EngineStoppedError, Request
from reset.evaluate.engines.chat import (
    check_thinking,
    prompt_ids,
    prompt_text,
    template_sha256,
)
from reset.evaluate.problems import Answer

_SHORTEST_CONTEXT = 512


class VllmEngine:
    """A model that vLLM loads with the first requests, which say how long a context they need.

    Args:
        model: folder or hub name.
        device, dtype: as `reset.vllm.engine.load_engine`.
        tensor_parallel: GPUs that share the model.
        use_nvfp4r: NVFP4 linear layers by this project's kernels instead of vLLM's own.
        thinking: switch of the chat template; None leaves it alone.
        max_running: answers decoded at once.

    Raises:
        ImportError: vLLM is not installed.
        ValueError, OSError: as `load_engine`; the template has no thinking switch.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str | None = None,
        dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
        tensor_parallel: int = 1,
        use_nvfp4r: bool = False,
        thinking: bool | None = None,
        max_running: int = 8,
    ) -> None:
        from reset.engine import package_versions
        from reset.vllm import engine as vllm_engine

        self._loaded = vllm_engine.load_engine(model, device=device, dtype=dtype)
        check_thinking(self._loaded.tokenizer, thinking)
        if use_nvfp4r:
            import nvfp4r

            nvfp4r.enable()
        self._thinking = thinking
        self._options = {
            **self._loaded.options,
            "tensor_parallel_size": tensor_parallel,
            "max_num_seqs": max_running,
        }
        self._llm: Any = None
        self._context = 0
        self._about = {
            "name": "vllm",
            "model": model,
            "model_sha256": folder_sha256(self._loaded.folder),
            "quantisation": self._loaded.quantisation,
            "backend": "nvfp4r" if use_nvfp4r else "vllm",
            "dtype": dtype,
            "tensor_parallel": tensor_parallel,
            "max_running": max_running,  # decides how batches round
            "thinking": thinking,
            "chat_template_sha256": template_sha256(self._loaded.tokenizer),
            "versions": {**package_versions(), **_vllm_versions()},
        }

    def describe(self) -> dict[str, Any]:
        return self._about

    def render(self, request: Request) -> str:
        return prompt_text(self._loaded.tokenizer, request, self._thinking)

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompts = [prompt_ids(self._loaded.tokenizer, self.render(one)) for one in requests]
        self._load(
            max(len(ids) + one.max_tokens for ids, one in zip(prompts, requests, strict=True))
        )
        engine = self._llm.llm_engine
        running = {str(position) for position in range(len(requests))}
        for position, (ids, request) in enumerate(zip(prompts, requests, strict=True)):
            values = request.config.to_dict()
            policy = {key: value for key, value in values.items() if value is not None}
            parameters = SamplingParams(
                temperature=1.0,  # the policy's temperature is the only one
                top_p=request.top_p,
                min_p=request.min_p,
                seed=request.seed,
                max_tokens=request.max_tokens,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={"reset": 1, **policy},
            )
            engine.add_request(str(position), {"prompt_token_ids": ids}, parameters)
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        running.discard(output.request_id)
                        yield int(output.request_id), _answer(output.outputs[0])
        finally:
            if running:
                engine.abort_request(sorted(running))

    def _load(self, context: int) -> None:
        if self._llm is not None and context <= self._context:
            return
        from vllm import LLM

        self._llm = None  # before the next one takes its memory
        self._context = max(_SHORTEST_CONTEXT, context)
        self._llm = LLM(
            model=str(self._loaded.folder),
            logits_processors=["reset.vllm:ReSETLogitsProcessor"],
            max_model_len=self._context,
            **self._options,
        )


def _answer(output: Any) -> Answer:
    if output.finish_reason not in ("stop", "length"):
        raise EngineStoppedError(f"vLLM ended an answer with {output.finish_reason!r}")
    return Answer(output.text, output.finish_reason, len(output.token_ids))


def _vllm_versions() -> dict[str, str]:
    """Of the package vllm, or of its build for CPUs."""
    names = sorted(set(metadata.packages_distributions().get("vllm", [])))
    return {name: metadata.version(name) for name in names}
