"""The two ways in which NVFP4 checkpoints name and describe their tensors.

ModelOpt stores global scales as multipliers, compressed-tensors as divisors; both keep the same
codes and block scales. This module knows the tensor suffixes of both, reads their configuration
blocks into one `QuantConfig` and writes them back. It opens no tensor file: what the tensors say is
reader.py's business.

Formats: ModelOpt `hf_quant_config.json` and its `quantization_config`; compressed-tensors
`nvfp4-pack-quantized`. The bytes are specified in docs/format.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from nvfp4r.format import BLOCK
from nvfp4r.groups import matches_any
from nvfp4r.methods.rotation import Rotation
from nvfp4r.transforms import KEY as TRANSFORM_KEY
from nvfp4r.transforms import Transform, parse_transforms, transform_block

Dialect = Literal["modelopt", "compressed-tensors"]
Activations = Literal["nvfp4", "none"]
"""How activations enter a layer: quantised with a stored scale (W4A4), or as they are (W4A16)."""

CONFIG_FILE = "config.json"
SIDE_FILE = "hf_quant_config.json"
"""ModelOpt's own file, read by engines that do not look into config.json."""

CONFIG_KEYS = ("quantization_config", "compression_config")
"""Where config.json may hold the block; the second is an old compressed-tensors name."""

SUPPORTED = (
    "supported are ModelOpt (quant_algo NVFP4 or W4A16_NVFP4) and compressed-tensors "
    f"(nvfp4-pack-quantized), both with group size {BLOCK}"
)
_HEAD = "lm_head"
_REQUANTISE = "quantise the original model with reset-quantize"


@dataclass(frozen=True)
class TensorNames:
    """Suffixes of the tensors that make up one quantised module, and how scalars are stored."""

    codes: str
    block_scale: str
    global_scale: str
    input_scale: str
    stores_divisors: bool
    scalar_shape: tuple[int, ...]


TENSOR_NAMES: Mapping[Dialect, TensorNames] = MappingProxyType(
    {
        "modelopt": TensorNames(
            codes="weight",
            block_scale="weight_scale",
            global_scale="weight_scale_2",
            input_scale="input_scale",
            stores_divisors=False,
            scalar_shape=(),
        ),
        "compressed-tensors": TensorNames(
            codes="weight_packed",
            block_scale="weight_scale",
            global_scale="weight_global_scale",
            input_scale="input_global_scale",
            stores_divisors=True,
            scalar_shape=(1,),
        ),
    }
)


@dataclass(frozen=True)
class QuantConfig:
    """What the configuration files say about a checkpoint.

    Attributes:
        dialect: naming of the tensors.
        activations: None if the files leave it open; then an input scale anywhere means W4A4.
        exclude: modules that stay unquantised, as patterns for `groups.matches_any`.
        targets: class names or patterns that the block applies to; ("Linear",) for all layers.
        kv_cache: KV-cache format such as "FP8", None if it is not quantised.
        producer: name and version of the program that wrote the checkpoint, "" if not told.
        source_file: the file that the block came from.
        transform: a rotation of the inputs of quantised layers, whose weights are stored rotated.
    """

    dialect: Dialect
    activations: Activations | None
    exclude: tuple[str, ...]
    targets: tuple[str, ...]
    kv_cache: str | None
    producer: str
    source_file: Path
    transform: Transform | None = None

    @property
    def rotation(self) -> Rotation | None:
        """What a quantised layer does to its inputs first; None for plain NVFP4."""
        return None if self.transform is None else self.transform.rotation


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: the file is missing, unreadable, not JSON, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no such file, but the folder of a model needs one; copy it from where the "
            "model came from"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path}: cannot be read as JSON ({error}); fetch the file again"
        ) from error
    return _object(content, f"{path}")


def read_config(folder: Path) -> QuantConfig:
    """Reads the quantisation block of a checkpoint from config.json, hf_quant_config.json or both.

    Raises:
        ValueError: no block, one that is not NVFP4 with group size 16, an unknown dialect, or two
            blocks that contradict each other. The message names the file and what is supported.
    """
    config_file, side_file = folder / CONFIG_FILE, folder / SIDE_FILE
    config = read_json(config_file)
    blocks: list[tuple[str, QuantConfig]] = []
    for key in CONFIG_KEYS:
        if config.get(key) is not None:
            block = _object(config[key], f"{config_file}: {key}")
            blocks.append(_parse(block, config_file))
    if side_file.exists():
        blocks.append(_parse({"quant_method": "modelopt", **read_json(side_file)}, side_file))
    if not blocks:
        raise ValueError(
            f"{config_file}: no {CONFIG_KEYS[0]}, and no {SIDE_FILE} beside it, so this is not a "
            f"quantised checkpoint; {_REQUANTISE}"
        )
    algorithm, first = blocks[0]
    for other_algorithm, other in blocks[1:]:
        for what, mine, theirs in (
            ("the dialect", first.dialect, other.dialect),
            ("the algorithm", algorithm, other_algorithm),
            ("the excluded modules", sorted(set(first.exclude)), sorted(set(other.exclude))),
            ("the rotation of inputs", first.transform, other.transform),
        ):
            if mine != theirs:
                raise ValueError(
                    f"{first.source_file} and {other.source_file} disagree about {what}: "
                    f"{mine} against {theirs}; delete or correct the one that is out of date"
                )
    return first


def _parse(block: dict[str, Any], source: Path) -> tuple[str, QuantConfig]:
    """The algorithm's name and the parsed block."""
    match dialect_of(block):
        case "modelopt":
            return _parse_modelopt(block, source, _producer_of(block))
        case "compressed-tensors":
            return _parse_compressed_tensors(block, source, _producer_of(block))
    raise ValueError(
        f"{source}: quant_method is {block.get('quant_method')!r}; {SUPPORTED}; {_REQUANTISE}"
    )


def dialect_of(block: Mapping[str, Any]) -> Dialect | None:
    """The dialect that a configuration block belongs to; None for formats of other tools.

    It says nothing about the algorithm: both tools write other formats than NVFP4 as well.
    """
    method = block.get("quant_method")
    written_by = _producer_of(block).get("name")
    if method is None and ("quantization" in block or written_by == "modelopt"):
        return "modelopt"
    match str(method).lower().replace("_", "-"):
        case "modelopt" | "modelopt-fp4":
            return "modelopt"
        case "compressed-tensors":
            return "compressed-tensors"
    return None


def _producer_of(block: Mapping[str, Any]) -> dict[str, Any]:
    producer = block.get("producer")
    return producer if isinstance(producer, dict) else {}


def _parse_modelopt(
    block: dict[str, Any], source: Path, producer: dict[str, Any]
) -> tuple[str, QuantConfig]:
    values = block
    if "quantization" in block:  # the layout of hf_quant_config.json
        values = _object(block["quantization"], f"{source}: quantization")
    algorithm = str(values.get("quant_algo")).upper()
    if block.get(TRANSFORM_KEY):
        raise ValueError(
            f"{source}: {TRANSFORM_KEY} means nothing in ModelOpt's layout, so what the weights "
            f"are is not told; {_REQUANTISE}"
        )
    if algorithm not in ("NVFP4", "W4A16_NVFP4"):
        raise ValueError(
            f"{source}: quant_algo is {values.get('quant_algo')!r}; {SUPPORTED}; {_REQUANTISE}"
        )
    group_size = values.get("group_size")
    if group_size not in (None, BLOCK):
        raise ValueError(f"{source}: group_size is {group_size!r}; {SUPPORTED}; {_REQUANTISE}")
    activations: Activations | None = None
    targets: tuple[str, ...] = ("Linear",)
    if values.get("config_groups") is not None:
        activations, targets = _parse_groups(values["config_groups"], source)
    if algorithm == "W4A16_NVFP4":
        if activations == "nvfp4":
            raise ValueError(
                f"{source}: quant_algo W4A16_NVFP4 leaves activations alone, but input_activations "
                "describes 4-bit ones; set it to null, or quant_algo to NVFP4"
            )
        activations = "none"
    kv_cache = values.get("kv_cache_quant_algo")
    return algorithm, QuantConfig(
        dialect="modelopt",
        activations=activations,
        exclude=_patterns(values, "ignore" if "ignore" in values else "exclude_modules", source),
        targets=targets,
        kv_cache=str(kv_cache) if kv_cache else _kv_cache(values, source),
        producer=_producer(producer),
        source_file=source,
    )


def _parse_compressed_tensors(
    block: dict[str, Any], source: Path, producer: dict[str, Any]
) -> tuple[str, QuantConfig]:
    groups = block.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError(f"{source}: config_groups is {groups!r}, need at least one; {SUPPORTED}")
    formats = {block.get("format")} | {
        group.get("format") for group in groups.values() if isinstance(group, dict)
    }
    names = sorted(str(name) for name in formats if name is not None)
    if any(not name.lower().startswith("nvfp4") for name in names):
        raise ValueError(f"{source}: format is {', '.join(names)}; {SUPPORTED}; {_REQUANTISE}")
    sparsity = block.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise ValueError(
            f"{source}: sparsity_config is set, so the stored weights are not the layer's own; "
            f"need a checkpoint without it; {_REQUANTISE}"
        )
    activations, targets = _parse_groups(groups, source)
    return "nvfp4-pack-quantized", QuantConfig(
        dialect="compressed-tensors",
        activations=activations,
        exclude=_patterns(block, "ignore", source),
        targets=targets,
        kv_cache=_kv_cache(block, source),
        producer=_producer(producer),
        source_file=source,
        transform=parse_transforms(block.get(TRANSFORM_KEY), f"{source}: {TRANSFORM_KEY}"),
    )


def _parse_groups(groups: Any, source: Path) -> tuple[Activations, tuple[str, ...]]:
    """Activations and targets of `config_groups`, which all have to be NVFP4 of one kind."""
    kinds: set[Activations] = set()
    targets: list[str] = []
    for name, value in _object(groups, f"{source}: config_groups").items():
        where = f"{source}: config_groups.{name}"
        group = _object(value, where)
        _require_nvfp4(group.get("weights"), f"{where}.weights")
        if group.get("input_activations") is None:
            kinds.add("none")
        else:
            _require_nvfp4(group["input_activations"], f"{where}.input_activations")
            kinds.add("nvfp4")
        targets.extend(_strings(group, "targets", source))
    if len(kinds) != 1:
        found = "layers with and without 4-bit activations" if kinds else "no group"
        raise ValueError(
            f"{source}: config_groups holds {found}, need one kind for all layers; {_REQUANTISE}"
        )
    return kinds.pop(), tuple(dict.fromkeys(targets)) or ("Linear",)


def _require_nvfp4(arguments: Any, where: str) -> None:
    arguments = _object(arguments, where)
    for key, allowed in (
        ("num_bits", (4,)),
        ("type", ("float",)),
        ("group_size", (BLOCK,)),
        ("strategy", (None, "tensor_group")),
        ("symmetric", (None, True)),
    ):
        if arguments.get(key) not in allowed:
            raise ValueError(
                f"{where}: {key} is {arguments.get(key)!r}, need {allowed[-1]!r}; "
                f"{SUPPORTED}; {_REQUANTISE}"
            )


def _kv_cache(block: dict[str, Any], source: Path) -> str | None:
    if block.get("kv_cache_scheme") is None:
        return None
    scheme = _object(block["kv_cache_scheme"], f"{source}: kv_cache_scheme")
    bits, kind = scheme.get("num_bits"), scheme.get("type")
    if kind == "float" and bits in (4, 8):
        return "FP8" if bits == 8 else "NVFP4"
    return f"{kind} {bits} bits"


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: got {type(value).__name__}, need a JSON object")
    return value


def _strings(block: dict[str, Any], key: str, source: Path) -> tuple[str, ...]:
    value = block.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ValueError(f"{source}: {key} is {value!r}, need a list of names")
    return tuple(value)


def _patterns(block: dict[str, Any], key: str, source: Path) -> tuple[str, ...]:
    patterns = _strings(block, key, source)
    for pattern in patterns:
        try:
            matches_any("", [pattern])
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    return patterns


def _producer(producer: dict[str, Any]) -> str:
    written_by = producer.get("written_by")
    if isinstance(written_by, dict):
        producer = written_by
    return f"{producer.get('name') or ''} {producer.get('version') or ''}".strip()


def config_block(
    dialect: Dialect,
    activations: Activations,
    exclude: Iterable[str],
    producer: Mapping[str, Any],
    rotation: Rotation | None = None,
) -> dict[str, Any]:
    """The `quantization_config` block of config.json.

    Args:
        dialect: whose layout.
        activations: "nvfp4" for W4A4, "none" for W4A16.
        exclude: modules that stay unquantised.
        producer: at least name and version; loaders of either dialect ignore it here.
        rotation: of the inputs of quantised layers.

    Raises:
        ValueError: a rotation in ModelOpt's layout, which has no words for it.
    """
    if rotation is not None and dialect == "modelopt":
        raise ValueError(
            f"rotation is {rotation!r}, which the modelopt dialect cannot say; use "
            "compressed-tensors (--format compressed-tensors)"
        )
    ignore = list(exclude)
    arguments: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": BLOCK}
    if dialect == "modelopt":
        group: dict[str, Any] = {"weights": {"dynamic": False, **arguments}, "targets": ["Linear"]}
        if activations == "nvfp4":
            group["input_activations"] = {"dynamic": False, **arguments}
        return {
            "quant_method": "modelopt",
            "quant_algo": _modelopt_algorithm(activations),
            "config_groups": {"group_0": group},
            "ignore": ignore,
            "producer": dict(producer),
        }
    arguments = {**arguments, "strategy": "tensor_group", "symmetric": True}
    targets = ["Linear"]
    if not matches_any(_HEAD, ignore):
        targets.append(f"re:.*{_HEAD}$")  # no Linear in vLLM, so that only its name matches
    block = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "format": "nvfp4-pack-quantized",
                "targets": targets,
                "weights": {**arguments, "dynamic": False},
                "input_activations": (
                    {**arguments, "dynamic": "local"} if activations == "nvfp4" else None
                ),
            }
        },
        "ignore": ignore,
        "kv_cache_scheme": None,
        "producer": dict(producer),
    }
    if rotation is not None:
        block[TRANSFORM_KEY] = transform_block(rotation, targets, ignore)
    return block


def hf_quant_config(
    activations: Activations, exclude: Iterable[str], producer: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of ModelOpt's hf_quant_config.json.

    Engines that read this file alone recognise the layout by the producer name "modelopt" (it has
    no quant_method), so that name stays and `producer` goes below "written_by".
    """
    return {
        "producer": {"name": "modelopt", "written_by": dict(producer)},
        "quantization": {
            "quant_algo": _modelopt_algorithm(activations),
            "kv_cache_quant_algo": None,
            "group_size": BLOCK,
            "exclude_modules": list(exclude),
        },
    }


def _modelopt_algorithm(activations: Activations) -> str:
    return "NVFP4" if activations == "nvfp4" else "W4A16_NVFP4"
