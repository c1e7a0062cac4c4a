"""What of a model is to be quantised and what stays, decided before any weight is read.

Names, shapes and configuration decide; what cannot work is refused here. This module reads no
tensor and runs no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvfp4r.checkpoint.dialects import CONFIG_FILE, CONFIG_KEYS, SIDE_FILE, read_json
from nvfp4r.checkpoint.shards import ShardedTensors, TensorInfo
from nvfp4r.checkpoint.structure import is_embedding
from nvfp4r.format import BLOCK
from nvfp4r.groups import check_exclusions, fused_groups, matches_any

FLOATS = ("BF16", "F16", "F32")
_QUANTISED = ("U8", "I8", "F4", "F8_E4M3", "F8_E5M2", "F8_E8M0")
_HEADS = ("lm_head", "output_layer", "score", "classifier")
_SCALE_SUFFIXES = ("weight_scale", "weight_scale_inv", "weight_packed", "qweight", "qzeros")


@dataclass(frozen=True)
class ConversionPlan:
    """What will happen to every tensor of a source checkpoint.

    Attributes:
        source: the folder.
        config: its config.json.
        tensors: the source's tensors.
        quantised: weight of each module that is quantised, by module name, in file order.
        kept: why each other tensor stays as it is, by tensor name, in file order.
        groups: quantised modules that share their scales, as engines fuse them.
        exclude: what the new configuration calls unquantised.
        source_bytes, output_bytes: sizes of all tensors before and after.
    """

    source: Path
    config: dict[str, Any]
    tensors: ShardedTensors
    quantised: dict[str, TensorInfo]
    kept: dict[str, str]
    groups: tuple[tuple[str, ...], ...]
    exclude: tuple[str, ...]
    source_bytes: int
    output_bytes: int


def plan_conversion(
    source: str | Path, exclude: Sequence[str] = (), *, quantise_head: bool = False
) -> ConversionPlan:
    """Reads configuration and headers, and decides what to quantise.

    Quantised are matrices named "<module>.weight", except embeddings, output heads, routers and
    what `exclude` covers.

    Args:
        source: folder of a model in bfloat16, float16 or float32.
        exclude: patterns of modules to leave alone, see `groups.matches_any`.
        quantise_head: quantise lm_head too, if the model has one of its own.

    Raises:
        ValueError: no readable checkpoint, or one that is quantised already; a pattern that covers
            nothing, or only a part of a fused group; a layer whose K is no multiple of 16; experts
            stacked in one tensor; nothing to quantise; `quantise_head` with a head that is tied to
            the embedding, excluded or missing. Names files, tensors and patterns.
    """
    source = Path(source)
    config = read_json(source / CONFIG_FILE)
    _refuse_quantised_config(source, config)
    tensors = ShardedTensors(source)
    if tensors.problems:
        raise ValueError("; ".join(tensors.problems))
    infos = tensors.infos
    _refuse_quantised_tensors(infos)
    _refuse_unmatched(infos, exclude)
    if quantise_head:
        _require_own_head(source, config, infos, exclude)

    quantised: dict[str, TensorInfo] = {}
    kept: dict[str, str] = {}
    for name, info in infos.items():
        reason = _reason_to_keep(info, exclude, quantise_head)
        if reason is None:
            quantised[module_of(name)] = info
        else:
            kept[name] = reason
    linears = [module_of(name) for name, info in infos.items() if _is_matrix(info)]
    check_exclusions([name for name in linears if not is_embedding(name)], exclude)
    _refuse_unsupported(quantised)
    if not quantised:
        raise ValueError(
            f"{source}: nothing to quantise among {len(infos)} tensors, need at least one linear "
            "layer that is not excluded; look at --exclude"
        )
    source_bytes = sum(info.nbytes for info in infos.values())
    saved = sum(info.nbytes - _quantised_bytes(info) for info in quantised.values())
    return ConversionPlan(
        source=source,
        config=config,
        tensors=tensors,
        quantised=quantised,
        kept=kept,
        groups=tuple(fused_groups(quantised)),
        exclude=_config_exclusions(infos, quantised),
        source_bytes=source_bytes,
        output_bytes=source_bytes - saved,
    )


def module_of(name: str) -> str:
    """The module of a weight; the full name of a parameter that is not called weight."""
    return name.removesuffix(".weight")


def _is_matrix(info: TensorInfo) -> bool:
    return len(info.shape) == 2 and info.name.endswith(".weight")


def _is_expert_stack(info: TensorInfo) -> bool:
    """Whether a tensor holds one matrix per expert; convolutions have small kernels instead."""
    return len(info.shape) == 3 and min(info.shape[1:]) >= BLOCK


def _is_router(module: str) -> bool:
    last = module.rpartition(".")[2]
    return last == "gate" or last.endswith("_gate") or "router" in module


def _reason_to_keep(
    info: TensorInfo, exclude: Sequence[str], quantise_head: bool = False
) -> str | None:
    module = module_of(info.name)
    is_weight = _is_matrix(info) or _is_expert_stack(info)
    if is_weight and matches_any(module, exclude):
        return "excluded"
    if is_embedding(module):
        return "embedding"
    if not is_weight:
        return "norm, bias or other vector" if len(info.shape) < 2 else "not a linear weight"
    if module.rpartition(".")[2] in _HEADS:
        return None if quantise_head and _is_lm_head(module) else "output head"
    if _is_router(module):
        return "router"
    return None


def _is_lm_head(module: str) -> bool:
    return module.rpartition(".")[2] == _HEADS[0]


def _require_own_head(
    source: Path,
    config: Mapping[str, Any],
    infos: Mapping[str, TensorInfo],
    exclude: Sequence[str],
) -> None:
    heads = [module_of(name) for name in infos if _is_lm_head(module_of(name))]
    text = config.get("text_config")
    is_tied = any(
        part.get("tie_word_embeddings") for part in (config, text if isinstance(text, dict) else {})
    )
    if is_tied or not heads:
        why = (
            "tie_word_embeddings is true" if is_tied else "there is no tensor named lm_head.weight"
        )
        raise ValueError(
            f"{source / CONFIG_FILE}: lm_head cannot be quantised, as {why}: the output head "
            "shares the matrix of the embedding, which stays in 16 bits; leave "
            "--quantize-lm-head out"
        )
    if matches_any(heads[0], exclude):
        raise ValueError(
            f"{heads[0]}: --exclude covers it, but --quantize-lm-head asks for it; leave one out"
        )


def _quantised_bytes(info: TensorInfo) -> int:
    N, K = info.shape
    return N * K // 2 + N * K // BLOCK + 4


def _refuse_quantised_config(source: Path, config: Mapping[str, Any]) -> None:
    for key in CONFIG_KEYS:
        block = config.get(key)
        if block is not None:
            method = block.get("quant_method") if isinstance(block, dict) else block
            raise ValueError(
                f"{source / CONFIG_FILE}: {key} says that this model is quantised already "
                f"({method}), need the original in bfloat16, float16 or float32"
            )
    if (source / SIDE_FILE).exists():
        raise ValueError(
            f"{source / SIDE_FILE}: says that this model is quantised already, need the original "
            "in bfloat16, float16 or float32"
        )


def _refuse_quantised_tensors(infos: Mapping[str, TensorInfo]) -> None:
    for name, info in infos.items():
        suffix = name.rpartition(".")[2]
        is_low = info.dtype in _QUANTISED and suffix == "weight"
        if is_low or suffix in _SCALE_SUFFIXES:
            raise ValueError(
                f"{info.file}: {name} is {info.dtype} {list(info.shape)}, so the model is "
                "quantised already, need the original in bfloat16, float16 or float32"
            )


def _refuse_unmatched(infos: Mapping[str, TensorInfo], exclude: Sequence[str]) -> None:
    modules = {info.name.rpartition(".")[0] for info in infos.values()}
    modules |= {module_of(name) for name in infos} | {"lm_head"}  # a tied head has no tensor
    for pattern in exclude:
        if not any(matches_any(module, [pattern]) for module in modules):
            raise ValueError(
                f"exclusion pattern {pattern!r} covers none of the {len(modules)} modules; give a "
                "module name, a glob like '*.down_proj', or 're:' and a regular expression"
            )


def _refuse_unsupported(quantised: Mapping[str, TensorInfo]) -> None:
    stacks = [info for info in quantised.values() if _is_expert_stack(info)]
    if stacks:
        raise ValueError(
            f"{stacks[0].file}: {stacks[0].name} has shape {list(stacks[0].shape)}, need one "
            f"matrix per layer: experts stacked in one tensor ({len(stacks)} here) are not "
            "supported; exclude them (--exclude '*experts*'), or export the model with one tensor "
            "per expert"
        )
    odd = [name for name, info in quantised.items() if info.shape[1] % BLOCK]
    if odd:
        K = quantised[odd[0]].shape[1]
        more = f" (and {len(odd) - 1} more layers of such a size)" if len(odd) > 1 else ""
        raise ValueError(
            f"{odd[0]}: K={K}, need a multiple of {BLOCK}{more}; leave it unquantised with "
            f"--exclude '{odd[0]}'"
        )
    for info in quantised.values():
        if info.dtype not in FLOATS or 0 in info.shape:
            raise ValueError(
                f"{info.file}: {info.name} is {info.dtype} {list(info.shape)}, need a matrix in "
                f"{', '.join(FLOATS)}; exclude the layer (--exclude '{module_of(info.name)}')"
            )


def _config_exclusions(
    infos: Mapping[str, TensorInfo], quantised: Mapping[str, TensorInfo]
) -> tuple[str, ...]:
    """Exact names of all linear layers that stay, which every engine reads in the same way.

    Experts that all stay are named by their common parent, as engines make one module of them. A
    tied head has no tensor, but is a module that engines would quantise.
    """
    names: dict[str, None] = {}
    for info in infos.values():
        module = module_of(info.name)
        if module in quantised or not (_is_matrix(info) or _is_expert_stack(info)):
            continue
        parent, dot, _ = module.rpartition(".experts.")
        experts = f"{parent}.experts"
        if dot and not any(name.startswith(f"{experts}.") for name in quantised):
            names[experts] = None
        elif not is_embedding(module):
            names[module] = None
    if not any(_is_lm_head(name) for name in quantised):
        names["lm_head"] = None
    return tuple(sorted(names))
