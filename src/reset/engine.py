"""The transformers engine: load a model, decode prompts with a policy, return what happened.

NVFP4 checkpoints are loaded by `nvfp4r.hf`, anything else by transformers itself. The commands and
the studies share this module; it prints nothing and knows no command line.
"""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation.streamers import BaseStreamer

import reset
from reset.config import ReSETConfig
from reset.hf import ReSETLogitsProcessor, sampling_arguments
from reset.hub import model_folder
from reset.text import TextStream, decode
from reset.trace.record import Trace

DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
ActivationChoice = Literal["checkpoint", "none", "nvfp4"]


@dataclass(frozen=True)
class Engine:
    """A loaded model with its tokenizer.

    `name` is how the user called it, `folder` where its files are, `quantisation` what is known of
    its format: {"format": "none"}, or dialect, activations and producer of an NVFP4 checkpoint.
    """

    name: str
    folder: Path
    quantisation: dict[str, str]
    model: Any
    tokenizer: Any

    @property
    def eos_token_ids(self) -> list[int]:
        """Every id that ends a text, of the model and of the tokenizer."""
        ids = self.model.generation_config.eos_token_id
        ids = [ids] if isinstance(ids, int) else list(ids or [])
        if self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        return sorted(set(ids))


def is_nvfp4(folder: Path) -> bool:
    """True if `folder` is a checkpoint in a format that `nvfp4r` reads or must refuse itself.

    Raises:
        ValueError: there is no config.json, or it is not JSON.
    """
    from nvfp4r.checkpoint.dialects import (
        CONFIG_FILE,
        CONFIG_KEYS,
        SIDE_FILE,
        dialect_of,
        read_json,
    )

    config = read_json(folder / CONFIG_FILE)
    blocks = [block for key in CONFIG_KEYS if isinstance(block := config.get(key), dict)]
    return (folder / SIDE_FILE).exists() or any(dialect_of(block) for block in blocks)


def load_engine(
    model: str,
    *,
    device: str = "cpu",
    dtype: DtypeName = "auto",
    activations: ActivationChoice = "checkpoint",
) -> Engine:
    """Load a model folder, or a hub name that transformers can resolve.

    Args:
        model: a folder, or a hub name.
        device: torch device of the weights.
        dtype: "auto" (the checkpoint's), "bfloat16", "float16" or "float32".
        activations: for NVFP4 checkpoints: "checkpoint", "none" (16-bit) or "nvfp4" (W4A4).

    Raises:
        ValueError: the checkpoint is damaged or not supported, or `activations` is asked of a model
            that is not NVFP4.
        OSError: no such folder or hub model.
    """
    torch_dtype: torch.dtype | Literal["auto"] = "auto"
    if dtype != "auto":
        torch_dtype = getattr(torch, dtype)
    folder = model_folder(model)
    quantisation = {"format": "none"}
    if is_nvfp4(folder):
        from nvfp4r.checkpoint.dialects import read_config
        from nvfp4r.hf import load_model

        loaded = load_model(folder, device=device, dtype=torch_dtype, activations=activations)
        block = read_config(folder)
        quantisation = {
            "format": f"NVFP4, {block.dialect}",
            "activations": activations,
            "producer": block.producer,
        }
    elif activations != "checkpoint":
        raise ValueError(
            f"{model} is not an NVFP4 checkpoint, so activations={activations!r} has no meaning; "
            "leave it out, or make one with reset-quantize"
        )
    else:
        loaded = _load_plain(folder, torch_dtype, device)
    return Engine(model, folder, quantisation, loaded, AutoTokenizer.from_pretrained(folder))


def _load_plain(folder: Path, dtype: torch.dtype | Literal["auto"], device: str) -> Any:
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map={"": device})
    except SafetensorError as error:
        from nvfp4r.checkpoint.shards import ShardedTensors

        # transformers does not say which of the files it is.
        problems = ShardedTensors(folder).problems or [f"{folder}: {error}"]
        raise ValueError("; ".join(problems)) from error
    return model.eval()


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model sees it: `text`, chat template included, and its token `ids`."""

    text: str
    ids: tuple[int, ...]


def make_prompt(
    engine: Engine, question: str, *, system: str | None = None, chat: bool = True
) -> Prompt:
    """Wrap a question in the model's chat template, if it has one and `chat` is set.

    Raises:
        ValueError: the question gives no tokens, or `system` has no template to go into.
    """
    tokenizer = engine.tokenizer
    text = question
    templated = chat and tokenizer.chat_template is not None
    if templated:
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    elif system is not None:
        raise ValueError("a system prompt needs a chat template; put it into the prompt itself")
    # A chat template writes its own special tokens; a plain prompt needs the tokenizer's.
    ids = tokenizer(text, add_special_tokens=not templated)["input_ids"]
    if not question.strip() or not ids:
        raise ValueError("the prompt is empty; pass some text")
    return Prompt(text, tuple(ids))


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    config: ReSETConfig,
    *,
    max_new_tokens: int,
    top_p: float = 0.95,
    seed: int | None = None,
    alternatives: int = 3,
    on_text: Callable[[str], None] | None = None,
) -> list[Trace]:
    """Decode prompts as one batch, each row with its own policy state.

    The model's own sampling defaults (temperature, top-k, repetition penalty) are switched off:
    the policy decides the temperature and sees raw logits.

    Args:
        prompts: made by `make_prompt`.
        config: policy of every prompt.
        max_new_tokens: output limit in tokens, >= 1.
        top_p: nucleus, in (0, 1]; applied after the temperature.
        seed: of torch's generator; None draws one, which the traces name.
        alternatives: likeliest tokens recorded per position.
        on_text: called with each piece of text as it comes; one prompt only.

    Returns:
        One `Trace` a prompt. `seconds` is set for a single prompt only: rows of a batch share time.

    Raises:
        ValueError: an argument is out of range, or logits turn NaN.
    """
    check_sampling(max_new_tokens, top_p, seed)
    if not prompts:
        raise ValueError("no prompts; pass at least one")
    if on_text is not None and len(prompts) != 1:
        raise ValueError(f"on_text streams one text, but there are {len(prompts)} prompts")
    if seed is None:
        seed = secrets.randbelow(2**31)
    encoded = _pad_left(engine, prompts)
    processor = ReSETLogitsProcessor(
        config,
        engine.tokenizer,
        eos_token_id=engine.eos_token_ids,
        record=True,
        alternatives=alternatives,
    )
    torch.manual_seed(seed)
    start = time.perf_counter()
    sequences = engine.model.generate(
        **encoded,
        generation_config=_generation_config(engine, max_new_tokens, top_p),
        logits_processor=[processor],
        streamer=_Streamer(engine, on_text) if on_text is not None else None,
    )
    seconds = time.perf_counter() - start
    versions = package_versions()
    return [
        Trace(
            model=engine.name,
            prompt=prompt.text,
            policy=config.to_dict(),
            seed=seed,
            tokens=tokens,
            finish_reason="stop" if tokens[-1].token_id in engine.eos_token_ids else "length",
            seconds=seconds if len(prompts) == 1 else None,
            versions=versions,
        )
        for prompt, tokens in zip(
            prompts, processor.traces(sequences, engine.tokenizer), strict=True
        )
    ]


def answer(engine: Engine, trace: Trace) -> str:
    """The text of a trace without the token that ended it."""
    ids = [token.token_id for token in trace.tokens]
    return decode(engine.tokenizer, ids[:-1] if trace.finish_reason == "stop" else ids)


def check_sampling(max_new_tokens: int, top_p: float, seed: int | None) -> None:
    """Refuses arguments of `generate` that can be judged without a model.

    Raises:
        ValueError: names the argument and its range.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1 (1 keeps all tokens)")
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}; it must be between 0 and 2**63 - 1")


def _pad_left(engine: Engine, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
    width = max(len(prompt.ids) for prompt in prompts)
    pad = _pad_id(engine)
    ids = [[pad] * (width - len(prompt.ids)) + list(prompt.ids) for prompt in prompts]
    mask = [[0] * (width - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in prompts]
    device = engine.model.device
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


def _pad_id(engine: Engine) -> int:
    if engine.tokenizer.pad_token_id is not None:
        return int(engine.tokenizer.pad_token_id)
    return engine.eos_token_ids[0] if engine.eos_token_ids else 0


def _generation_config(engine: Engine, max_new_tokens: int, top_p: float) -> GenerationConfig:
    # Fields left out are taken from the model's own configuration: name those that touch logits.
    return GenerationConfig(
        **sampling_arguments(top_p=top_p, max_new_tokens=max_new_tokens),
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=engine.eos_token_ids or None,
        pad_token_id=_pad_id(engine),
    )


def package_versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "reset-decoding": reset.__version__,
    }


class _Streamer(BaseStreamer):
    """Hands each output token's text to `on_text`; the prompt and the final token stay out."""

    def __init__(self, engine: Engine, on_text: Callable[[str], None]) -> None:
        self._stream = TextStream(engine.tokenizer)
        self._eos = set(engine.eos_token_ids)
        self._on_text = on_text
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        for token in value.flatten().tolist():
            if token not in self._eos and (piece := self._stream.push(token)):
                self._on_text(piece)

    def end(self) -> None:
        if piece := self._stream.flush():
            self._on_text(piece)
