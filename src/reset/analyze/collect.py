"""Fills dumps: decodes problems freely, or scores sequences that are given (teacher forcing).

Both end in the same forward pass over the whole sequence (`measure`), so that two models' records
of one sequence differ by the models alone; a decoding keeps beside them the entropies that its
policy saw. Knows the transformers engine; knows no command line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from reset.analyze.dump import HEADER_FILE, AnswerRecord, Dump, require_complete, step_indices
from reset.analyze.measure import context_length, score_tokens, vocabulary_size
from reset.calibrate import folder_sha256, text_sha256
from reset.config import ReSETConfig
from reset.steps import StepDetector
from reset.texts import read_texts

if TYPE_CHECKING:
    from reset.engine import Engine

Progress = Callable[[int], None]
"""Called with how many answers are there."""


@dataclass(frozen=True)
class Sampling:
    """How problems are decoded. Problem i is of batch i // batch_size, with seed + i // batch_size,
    so that a dump that was interrupted ends as one that was not."""

    policy: ReSETConfig
    max_tokens: int
    top_p: float
    seed: int
    batch_size: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1")


@dataclass(frozen=True)
class Given:
    """Sequences to score: (prompt ids, ids) each, and what they are to be called."""

    source: str
    names: Sequence[str]  # sha256 of each, as the header lists them
    sequences: Callable[[int], tuple[list[int], list[int]]]


def dump_answers(
    engine: Engine,
    folder: Path,
    problems: Sequence[str],
    sampling: Sampling,
    *,
    data: str,
    advance: Progress,
) -> Dump:
    """Decode `problems` and record every output token; goes on with an interrupted dump.

    Raises:
        ValueError: as `Dump.start` and `reset.engine.generate`.
        OSError: as `Dump.start`.
    """
    from reset import engine as hf_engine

    settings = {
        **_model_settings(engine),
        "mode": "free",
        "policy": sampling.policy.to_dict(),
        "max_tokens": sampling.max_tokens,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "batch_size": sampling.batch_size,
        "data": data,
        "texts_sha256": [text_sha256(problem) for problem in problems],
    }
    prompts = [hf_engine.make_prompt(engine, problem) for problem in problems]
    dump = Dump.start(folder, settings, _made_with(engine))
    detector = _detector(engine)
    for batch, start in enumerate(range(0, len(prompts), sampling.batch_size)):
        members = range(start, min(start + sampling.batch_size, len(prompts)))
        if all(dump.has(index) for index in members):
            continue
        traces = hf_engine.generate(
            engine,
            [prompts[index] for index in members],
            sampling.policy,
            max_new_tokens=sampling.max_tokens,
            top_p=sampling.top_p,
            seed=sampling.seed + batch,
            alternatives=0,
        )
        for index, trace in zip(members, traces, strict=True):
            record = _record(
                engine,
                detector,
                list(prompts[index].ids),
                [token.token_id for token in trace.tokens],
                trace.finish_reason,
                where=f"problem {index}",
                sampler_entropy_nats=_floats(token.entropy_nats for token in trace.tokens),
                temperature=_floats(token.temperature for token in trace.tokens),
            )
            dump.write(index, record)
            advance(len(dump.done()))
    return dump


def dump_given(
    engine: Engine, folder: Path, given: Given, max_tokens: int | None, *, advance: Progress
) -> Dump:
    """Record every token of sequences that are given, under `engine`'s model (teacher forcing).

    Args:
        max_tokens: only so many of each sequence; None: all.

    Raises:
        ValueError: as `Dump.start`; a sequence does not fit the model.
        OSError: as `Dump.start`.
    """
    settings = {
        **_model_settings(engine),
        "mode": "forced",
        "policy": None,
        "max_tokens": max_tokens,
        "data": given.source,
        "texts_sha256": list(given.names),
    }
    dump = Dump.start(folder, settings, _made_with(engine))
    detector = _detector(engine)
    for index in range(dump.total):
        if not dump.has(index):
            prompt, tokens = given.sequences(index)
            tokens = tokens[:max_tokens]
            where = f"sequence {index}"
            dump.write(index, _record(engine, detector, prompt, tokens, "given", where=where))
            advance(len(dump.done()))
    return dump


def sequences_of_dump(engine: Engine, source: Path, count: int | None) -> Given:
    """The sequences of another dump, token for token; all by default.

    Raises:
        ValueError: it is not complete, has fewer than `count`, or comes from another tokenizer.
    """
    other = Dump.open(source)
    require_complete(other)
    if other.settings["vocabulary_sha256"] != vocabulary_sha256(engine.tokenizer):
        raise ValueError(
            f"{source}: was made with another vocabulary ({other.settings['model']}) than that of "
            f"{engine.name}; the same token ids mean other texts there. Compare a model with its "
            "own quantised form"
        )
    count = other.total if count is None else count
    if not 1 <= count <= other.total:
        raise ValueError(f"{source}: holds {other.total} sequences, but {count} were asked for")

    def sequence(index: int) -> tuple[list[int], list[int]]:
        answer = other.read(index)
        return answer.prompt_ids.tolist(), answer.token_id.tolist()

    digests = [_sequence_sha256(*sequence(index)) for index in range(count)]
    return Given(str(source), digests, sequence)


def sequences_of_texts(engine: Engine, source: str, count: int) -> Given:
    """Texts as they are, without a chat template; the first token of each is its prompt.

    Args:
        source: as for `reset.texts.read_texts`.
        count: how many at most.

    Raises:
        ValueError: as `read_texts`, or a text has fewer than two tokens.
    """
    ids = [engine.tokenizer(text)["input_ids"] for text in read_texts(source, count)]
    for index, tokens in enumerate(ids):
        if len(tokens) < 2:
            raise ValueError(f"{source}: text {index} has {len(tokens)} tokens, need at least 2")
    digests = [_sequence_sha256(tokens[:1], tokens[1:]) for tokens in ids]
    return Given(source, digests, lambda index: (ids[index][:1], ids[index][1:]))


def is_dump(source: str) -> bool:
    """True if `source` is a dump folder rather than texts."""
    return (Path(source) / HEADER_FILE).is_file()


def vocabulary_sha256(tokenizer: Any) -> str:
    """Identity of what token ids mean."""
    return text_sha256(json.dumps(sorted(tokenizer.get_vocab().items())))


def _record(
    engine: Engine,
    detector: StepDetector,
    prompt: list[int],
    tokens: list[int],
    finish_reason: str,
    *,
    where: str,
    sampler_entropy_nats: np.ndarray | None = None,
    temperature: np.ndarray | None = None,
) -> AnswerRecord:
    try:
        scores = score_tokens(engine.model, prompt, tokens)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    ends_step = _step_ends(detector, tokens)
    return AnswerRecord(
        prompt_ids=np.array(prompt, dtype=np.int32),
        token_id=np.array(tokens, dtype=np.int32),
        entropy_nats=scores.entropy_nats,
        logprob_nats=scores.logprob_nats,
        rank=scores.rank,
        step=step_indices(ends_step),
        ends_step=ends_step,
        finish_reason=finish_reason,
        sampler_entropy_nats=sampler_entropy_nats,
        temperature=temperature,
    )


def _step_ends(detector: StepDetector, tokens: list[int]) -> np.ndarray:
    state = detector.initial_state(1)
    ends = []
    for token in torch.tensor(tokens).unsqueeze(1):
        state, ended = detector.advance(state, token)
        ends.append(bool(ended))
    return np.array(ends, dtype=np.bool_)


def _detector(engine: Engine) -> StepDetector:
    return StepDetector.from_tokenizer(engine.tokenizer, vocab_size=vocabulary_size(engine.model))


def _model_settings(engine: Engine) -> dict[str, Any]:
    return {
        "model": engine.name,
        "model_sha256": folder_sha256(engine.folder),
        "quantisation": engine.quantisation,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "context_length": context_length(engine.model),
        "vocabulary_sha256": vocabulary_sha256(engine.tokenizer),
    }


def _made_with(engine: Engine) -> dict[str, Any]:
    from reset.engine import package_versions

    return {"device": str(engine.model.device), "versions": package_versions()}


def _sequence_sha256(prompt: Sequence[int], tokens: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps([list(prompt), list(tokens)]).encode()).hexdigest()


def _floats(values: Any) -> np.ndarray:
    return np.fromiter(values, dtype=np.float32)
