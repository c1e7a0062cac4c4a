"""How far the weights of NVFP4 checkpoints are from those that they were made of, layer by layer.

Weights that a checkpoint stores rotated are compared with the rotated source: the rotation is
orthogonal, so the Frobenius norm of the difference is that of the weights rotated back. A
checkpoint whose layers were scaled, with the scales folded into norms or other layers (awq), has
no such difference: its weights are meant to be others. It is refused.

Reads tensor by tensor; runs no model. What the errors do to a model is for perplexity to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from nvfp4r.checkpoint import NVFP4Checkpoint, load_checkpoint
from nvfp4r.checkpoint.dialects import CONFIG_FILE, CONFIG_KEYS, SIDE_FILE, read_json
from nvfp4r.checkpoint.shards import ShardedTensors
from nvfp4r.format import BLOCK, E2M1_MAX, NVFP4Tensor, row_chunks, unpack_codes
from nvfp4r.methods.rotation import Rotation, rotate
from reset.analyze.study import Row, Study, rounded
from reset.calibrate import folder_sha256

_TOP_CODE = 7  # magnitude 6
_SMALLEST_NORMAL = 8  # byte of the smallest E4M3 value that is no subnormal

RULES = {
    "relative_error": "Frobenius norm of (stored - source) over that of the source",
    "snr_db": "-20 log10(relative_error)",
    "saturated": "share of codes 6 and -6 whose source weight lies beyond 6 steps of its block",
    "subnormal_scales": "share of block scales below 2^-6, those of zero blocks included",
    "zero_codes": "share of codes 0 and -0",
    "rotated": "in the rotated basis on both sides, which leaves relative_error as it is",
    "median, worst": "over layers; shares are over all codes or blocks of the layers",
}


@dataclass(frozen=True)
class WeightError:
    """One quantised matrix against its source.

    Attributes:
        squared_error, squared_norm: of the difference, and of the source.
        weights, saturated, zero_codes: counts.
        blocks, subnormal_scales: counts.
    """

    squared_error: float
    squared_norm: float
    weights: int
    saturated: int
    zero_codes: int
    blocks: int
    subnormal_scales: int

    @property
    def relative_error(self) -> float | None:
        """None for a source of zeros that is not stored as zeros."""
        if self.squared_norm == 0:
            return 0.0 if self.squared_error == 0 else None
        return math.sqrt(self.squared_error / self.squared_norm)

    @property
    def snr_db(self) -> float | None:
        """None where it is infinite or not defined."""
        error = self.relative_error
        return -20 * math.log10(error) if error else None


def weight_error(
    weight: Tensor, stored: NVFP4Tensor, rotation: Rotation | None = None
) -> WeightError:
    """Compares a stored matrix with its source, a few rows at a time, in float64.

    Args:
        weight: [N, K] floating, the source, not rotated.
        stored: [N, K], one global scale.
        rotation: of `stored`.

    Raises:
        ValueError: the shapes differ.
    """
    if tuple(weight.shape) != stored.shape:
        raise ValueError(f"the source is {list(weight.shape)}, the stored matrix {stored.shape}")
    N, K = weight.shape
    squared_error = squared_norm = 0.0
    saturated = zero_codes = subnormal = 0
    for rows in row_chunks(N, K):
        wide = weight[rows].double() if rotation is None else rotate(weight[rows]).double()
        part = NVFP4Tensor(stored.codes[rows], stored.block_scale[rows], stored.global_scale)
        magnitudes = unpack_codes(part.codes) & 7
        steps = part.block_scale.double() * part.global_scale.double()  # [rows, K/16]
        limits = (E2M1_MAX * steps).repeat_interleave(BLOCK, dim=1)
        squared_error += float((part.dequantize(torch.float64) - wide).square().sum())
        squared_norm += float(wide.square().sum())
        saturated += int(((magnitudes == _TOP_CODE) & (wide.abs() > limits)).sum())
        zero_codes += int((magnitudes == 0).sum())
        subnormal += int((part.block_scale.view(torch.uint8) < _SMALLEST_NORMAL).sum())
    blocks = N * K // BLOCK
    return WeightError(squared_error, squared_norm, N * K, saturated, zero_codes, blocks, subnormal)


@dataclass(frozen=True)
class Candidate:
    """A checkpoint to compare: its name, how tables call it, and its method if it is told."""

    name: str
    label: str
    method: str | None
    checkpoint: NVFP4Checkpoint


def open_candidates(folders: Mapping[str, Path]) -> list[Candidate]:
    """Opens checkpoints, by the names that the user gave them.

    A checkpoint is called by its method, or by the name of its folder where the method is not told
    or occurs twice.

    Raises:
        ValueError: a folder is no sound NVFP4 checkpoint, is an awq one, or is given twice.
    """
    methods = {name: method_of(folder) for name, folder in folders.items()}
    opened = []
    for name, folder in folders.items():
        method = methods[name]
        if method == "awq":
            raise ValueError(
                f"{name}: was made by awq, which scales the weights and folds the scales into "
                "norms and other layers, so that they are not to be near the source's; leave it "
                "out here, and compare it by reset-analyze perplexity"
            )
        is_unique = method is not None and list(methods.values()).count(method) == 1
        label = method if is_unique and method is not None else folder.name
        opened.append(Candidate(name, label, method, load_checkpoint(folder)))
    labels = [candidate.label for candidate in opened]
    if len(set(labels)) < len(labels):
        raise ValueError(f"two checkpoints are called {max(labels, key=labels.count)}; rename one")
    return opened


def method_of(folder: Path) -> str | None:
    """The method that a checkpoint's configuration names, as reset-quantize writes it."""
    documents = [read_json(folder / CONFIG_FILE)]
    if (folder / SIDE_FILE).exists():
        documents.append({CONFIG_KEYS[0]: read_json(folder / SIDE_FILE)})
    for document in documents:
        for key in CONFIG_KEYS:
            block = document.get(key)
            producer = block.get("producer") if isinstance(block, dict) else None
            producer = producer if isinstance(producer, dict) else {}
            written_by = producer.get("written_by")
            for place in (producer, written_by if isinstance(written_by, dict) else {}):
                if isinstance(place.get("method"), str):
                    return str(place["method"])
    return None


def open_source(folder: Path) -> ShardedTensors:
    """The tensors of the model that the checkpoints were made of.

    Raises:
        ValueError: it is damaged, or quantised itself.
    """
    config = read_json(folder / CONFIG_FILE)
    if (folder / SIDE_FILE).exists() or any(config.get(key) for key in CONFIG_KEYS):
        raise ValueError(
            f"{folder}: is a quantised model, need the one that the checkpoints were made of, in "
            "bfloat16, float16 or float32 (--source)"
        )
    tensors = ShardedTensors(folder)
    if tensors.problems:
        raise ValueError("; ".join(tensors.problems))
    return tensors


def common_layers(source: ShardedTensors, candidates: Sequence[Candidate]) -> list[str]:
    """Layers that all checkpoints quantise, in the order of the source's files.

    Raises:
        ValueError: there is none, the source has no such layer or one of another shape, or a norm
            differs from the source's, so that scales were folded into it. Names layer and file.
    """
    for candidate in candidates:
        checkpoint = candidate.checkpoint
        for name in checkpoint.names():
            info = checkpoint.info(name)
            if name not in source.infos or source.infos[name].shape != info.shape:
                found = list(source.infos[name].shape) if name in source.infos else "none"
                raise ValueError(
                    f"{info.file}: {name} is {list(info.shape)}, in the source {found}; "
                    "give the model that this checkpoint was made of (--source)"
                )
        for name in checkpoint.names():
            if len(checkpoint.info(name).shape) == 1:
                _require_equal(candidate, name, source.get(name))
    shared = set.intersection(*(set(c.checkpoint.modules) for c in candidates))
    if not shared:
        raise ValueError("no layer is quantised in all of these checkpoints; compare fewer")
    return [n.removesuffix(".weight") for n in source.infos if n.removesuffix(".weight") in shared]


def _require_equal(candidate: Candidate, name: str, original: Tensor) -> None:
    stored = candidate.checkpoint[name]
    assert isinstance(stored, Tensor)
    if not torch.equal(stored, original.to(stored.dtype)):
        raise ValueError(
            f"{candidate.name}: {name} is not that of the source, though it is not quantised; "
            "scales were folded into it (as awq and smoothquant do) or the model is another one, "
            "so its weights cannot be compared with the source's; leave it out, and compare it "
            "by reset-analyze perplexity"
        )


def compare_weights(
    source: ShardedTensors,
    candidates: Sequence[Candidate],
    layers: Sequence[str],
    *,
    provenance: Sequence[Mapping[str, Any]],
    advance: Callable[[int], None] = lambda done: None,
) -> Study:
    """Errors of every layer in every checkpoint, and tables over them.

    Args:
        source: see `open_source`.
        candidates: see `open_candidates`.
        layers: see `common_layers`.
        provenance: of the source and the checkpoints, see `provenance_of`.
        advance: called with how many layers are done.
    """
    found: dict[tuple[str, str], WeightError] = {}
    for done, layer in enumerate(layers, start=1):
        weight = source.get(f"{layer}.weight")
        for candidate in candidates:
            stored = candidate.checkpoint[f"{layer}.weight"]
            assert isinstance(stored, NVFP4Tensor)
            error = weight_error(weight, stored, candidate.checkpoint.rotation)
            found[candidate.label, layer] = error
        advance(done)
    kinds = {layer: layer.rpartition(".")[2] for layer in layers}
    left_out = {c.label: len(c.checkpoint.modules) - len(layers) for c in candidates}
    return Study(
        name="weights",
        rules=RULES,
        settings={"rotations": {c.label: c.checkpoint.rotation for c in candidates}},
        sources=provenance,
        summary={
            "layers": len(layers),
            "weights": sum(found[candidates[0].label, layer].weights for layer in layers),
            "layers_not_in_all": sum(left_out.values()),
        },
        tables={
            "methods": list(_summaries(found, candidates, kinds)),
            "layers": [
                {"method": label, "layer": layer, "kind": kinds[layer], **_numbers([error])}
                for (label, layer), error in found.items()
            ],
        },
    )


def _summaries(
    found: Mapping[tuple[str, str], WeightError],
    candidates: Sequence[Candidate],
    kinds: Mapping[str, str],
) -> Iterator[Row]:
    """One row for every kind of layer and checkpoint, and for all layers of a checkpoint."""
    for kind in [*dict.fromkeys(kinds.values()), "all"]:
        layers = [layer for layer, own in kinds.items() if kind in ("all", own)]
        for candidate in candidates:
            errors = {layer: found[candidate.label, layer] for layer in layers}
            known = {
                layer: value
                for layer, e in errors.items()
                if (value := e.relative_error) is not None
            }
            worst = max(known, key=lambda layer: known[layer], default=None)
            middle = median(known.values()) if known else None
            yield {
                "kind": kind,
                "method": candidate.label,
                "layers": len(layers),
                "median_error": None if middle is None else rounded(middle),
                "median_snr_db": rounded(-20 * math.log10(middle)) if middle else None,
                "worst_error": None if worst is None else rounded(known[worst]),
                "worst_layer": worst,
                **_shares(list(errors.values())),
            }


def _numbers(errors: Sequence[WeightError]) -> dict[str, Any]:
    (error,) = errors
    relative, snr = error.relative_error, error.snr_db
    return {
        "relative_error": None if relative is None else rounded(relative),
        "snr_db": None if snr is None else rounded(snr),
        **_shares(errors),
    }


def _shares(errors: Sequence[WeightError]) -> dict[str, float]:
    weights, blocks = sum(e.weights for e in errors), sum(e.blocks for e in errors)
    return {
        "saturated": rounded(sum(e.saturated for e in errors) / weights),
        "subnormal_scales": rounded(sum(e.subnormal_scales for e in errors) / blocks),
        "zero_codes": rounded(sum(e.zero_codes for e in errors) / weights),
    }


def provenance_of(name: str, folder: Path, candidate: Candidate | None = None) -> dict[str, Any]:
    """Where weights came from; the hash reads all files. `candidate` is None for the source."""
    quantisation: dict[str, Any] = {"format": "none"}
    if candidate is not None:
        quant = candidate.checkpoint.quant
        quantisation = {
            "format": f"NVFP4, {quant.dialect}",
            "method": candidate.method,
            "rotation": quant.rotation,
            "producer": quant.producer,
        }
    return {"model": name, "model_sha256": folder_sha256(folder), "quantisation": quantisation}
