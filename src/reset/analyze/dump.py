"""Per-token records of a model's answers on disk: a folder that grows by one file per answer.

`dump.json` says how the records were made; `00000.safetensors`, `00001.safetensors`, ... hold one
answer each and appear only when they are whole, so that an interrupted dump goes on where it
stopped. docs/analysis.md lists the fields. Knows no model and no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from reset.files import written_aside

SCHEMA = 1
ENTROPY_RULE = "Shannon entropy of softmax(raw logits), whole vocabulary, float32, nats"
"""What entropies of other origin (tempered scores, top-k logprobs) do not satisfy."""

HEADER_FILE = "dump.json"
FINISH_REASONS = ("stop", "length", "given")

_FIELDS: dict[str, type] = {
    "prompt_ids": np.int32,
    "token_id": np.int32,
    "entropy_nats": np.float32,
    "logprob_nats": np.float32,
    "rank": np.int32,
    "step": np.int32,
    "ends_step": np.bool_,
}
_SAMPLER_FIELDS: dict[str, type] = {"sampler_entropy_nats": np.float32, "temperature": np.float32}


@dataclass(frozen=True)
class AnswerRecord:
    """One answer, token by token; arrays are [T] but for `prompt_ids`.

    Args:
        prompt_ids: int32 [P], the tokens before the first one recorded.
        token_id: int32.
        entropy_nats: float32, H_t of the raw logits, from a forward pass over the whole sequence.
        logprob_nats: float32, log-probability of the token under them.
        rank: int32, 0 if the token is the likeliest (lowest id among equals).
        step: int32, index of the reasoning step that the token belongs to.
        ends_step: bool, True if the token completes a blank line.
        finish_reason: "stop" or "length" of a decoding; "given" if the text was given.
        sampler_entropy_nats: float32, H_t that the policy saw while it decoded; None if given.
        temperature: float32, T_t that the token was sampled at; None if given.

    Raises:
        ValueError: lengths disagree, a number is out of range, or steps do not follow `ends_step`.
    """

    prompt_ids: np.ndarray
    token_id: np.ndarray
    entropy_nats: np.ndarray
    logprob_nats: np.ndarray
    rank: np.ndarray
    step: np.ndarray
    ends_step: np.ndarray
    finish_reason: str
    sampler_entropy_nats: np.ndarray | None = None
    temperature: np.ndarray | None = None

    def __post_init__(self) -> None:
        count = len(self.token_id)
        for name, dtype in {**_FIELDS, **_SAMPLER_FIELDS}.items():
            values = getattr(self, name)
            if values is None and name in _SAMPLER_FIELDS:
                continue
            if values.ndim != 1 or values.dtype != dtype:
                raise ValueError(
                    f"{name} is {list(values.shape)} {values.dtype}, "
                    f"need one dimension of {np.dtype(dtype)}"
                )
            if name != "prompt_ids" and len(values) != count:
                raise ValueError(f"{name} has {len(values)} entries, need {count} as token_id has")
        if count == 0:
            raise ValueError("there are no tokens, need at least one")
        if not (np.isfinite(self.entropy_nats).all() and (self.entropy_nats >= 0).all()):
            raise ValueError("entropy_nats holds a value that is negative or not finite")
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"finish_reason is {self.finish_reason!r}, need {FINISH_REASONS}")
        if not np.array_equal(self.step, step_indices(self.ends_step)):
            raise ValueError("step does not follow from ends_step")

    def __len__(self) -> int:
        return len(self.token_id)


def step_indices(ends_step: np.ndarray) -> np.ndarray:
    """Index of each token's step, int32 [T]: the token that ends a step belongs to it."""
    return (np.cumsum(ends_step) - ends_step).astype(np.int32)


@dataclass(frozen=True)
class Dump:
    """A dump folder and what its header says.

    `settings` is what decides the numbers; a dump can be continued with the same settings only.
    `made_with` is kept beside them: versions and device.
    """

    folder: Path
    settings: Mapping[str, Any]
    made_with: Mapping[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Dump:
        """Read the header of a dump.

        Raises:
            ValueError: `folder` is no dump, one of another layout, or one whose entropies are not
                those of the raw logits over the whole vocabulary.
        """
        path = folder / HEADER_FILE
        if not path.is_file():
            raise ValueError(
                f"{folder}: has no {HEADER_FILE}; pass a folder that reset-analyze dump wrote"
            )
        try:
            header = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: is not JSON ({error}); make the dump again") from error
        if not isinstance(header, dict) or header.get("schema") != SCHEMA:
            raise ValueError(f"{path}: is not of layout {SCHEMA}; make the dump again")
        if header.get("entropy") != ENTROPY_RULE:
            raise ValueError(
                f"{path}: entropies are {header.get('entropy')!r}, need {ENTROPY_RULE!r}; values "
                "from tempered scores or from top-k logprobs cannot be compared with them"
            )
        return cls(folder, header["settings"], header["made_with"])

    @classmethod
    def start(cls, folder: Path, settings: Mapping[str, Any], made_with: Mapping[str, Any]) -> Dump:
        """Begin a dump, or go on with one of the same settings.

        Raises:
            ValueError: `folder` holds a dump of other settings (they are named), or other files.
            OSError: the folder cannot be made or written to.
        """
        settings = json.loads(json.dumps(settings))  # as they will be read back
        if (folder / HEADER_FILE).exists():
            found = cls.open(folder)
            names = {*found.settings, *settings}
            differ = sorted(n for n in names if found.settings.get(n) != settings.get(n))
            if differ:
                raise ValueError(
                    f"{folder}: holds a dump made with other settings ({', '.join(differ)}); "
                    "choose another --output, or use the same settings to go on with it"
                )
            return found
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder}: is neither empty nor a dump; choose another --output")
        folder.mkdir(parents=True, exist_ok=True)
        header: dict[str, Any] = {
            "schema": SCHEMA,
            "entropy": ENTROPY_RULE,
            "settings": settings,
            "made_with": dict(made_with),
        }
        with written_aside(folder / HEADER_FILE) as partial:
            partial.write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")
        return cls(folder, settings, header["made_with"])

    @property
    def total(self) -> int:
        """How many answers the dump will hold when it is complete."""
        return len(self.settings["texts_sha256"])

    def has(self, index: int) -> bool:
        """True if the answer is there."""
        return self._path(index).is_file()

    def done(self) -> list[int]:
        """Indices of the answers that are there."""
        return [index for index in range(self.total) if self.has(index)]

    def write(self, index: int, answer: AnswerRecord) -> None:
        """Add an answer; the file is whole or absent."""
        arrays = {
            name: np.ascontiguousarray(values)
            for name in (*_FIELDS, *_SAMPLER_FIELDS)
            if (values := getattr(answer, name)) is not None
        }
        metadata = {"finish_reason": answer.finish_reason}
        with written_aside(self._path(index)) as partial:
            save_file(arrays, partial, metadata=metadata)

    def read(self, index: int) -> AnswerRecord:
        """One answer.

        Raises:
            ValueError: the file is damaged; it is named.
        """
        path = self._path(index)
        try:
            with safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                reason = (file.metadata() or {}).get("finish_reason", "")
            return AnswerRecord(**arrays, finish_reason=reason)
        except (SafetensorError, ValueError, TypeError) as error:
            raise ValueError(
                f"{path}: is no whole answer record ({error}); delete it and make the dump again, "
                "which redoes what is missing"
            ) from error

    def answers(self) -> Iterator[AnswerRecord]:
        """Every answer that is there, in order."""
        for index in self.done():
            yield self.read(index)

    def provenance(self) -> dict[str, Any]:
        """What a reader of a result needs to know: model, origin of the texts, how many."""
        wanted = ("model", "model_sha256", "quantisation", "dtype", "mode", "policy", "data")
        return {
            "dump": str(self.folder),
            **{name: self.settings[name] for name in wanted},
            "answers": len(self.done()),
            "answers_wanted": self.total,
            **dict(self.made_with),
        }

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:05d}.safetensors"


def open_with_answers(folders: Sequence[Path]) -> list[Dump]:
    """Open dumps for a study.

    Raises:
        ValueError: as `Dump.open`, or a dump holds no answer yet.
    """
    dumps = [Dump.open(folder) for folder in folders]
    for dump in dumps:
        if not dump.done():
            raise ValueError(
                f"{dump.folder}: holds no answer yet; run reset-analyze dump to its end"
            )
    return dumps


def require_complete(dump: Dump) -> None:
    """Raise a ValueError unless every answer of the dump is there."""
    if len(dump.done()) < dump.total:
        raise ValueError(
            f"{dump.folder}: holds {len(dump.done())} of {dump.total} answers; run the same "
            "reset-analyze dump again to go on with it"
        )
