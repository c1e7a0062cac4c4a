"""Which stored tensors form a quantised module, judged by names, dtypes and shapes alone.

Sorts a checkpoint's tensors into quantised modules, plain parameters and KV-cache scales, and says
what does not fit: missing or orphaned scales, wrong shapes, contradictions with the configuration.
It reads no tensor; values are checked by reader.py and `NVFP4Tensor.validate`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from nvfp4r.checkpoint.dialects import TENSOR_NAMES, Activations, QuantConfig, TensorNames
from nvfp4r.checkpoint.shards import TensorInfo
from nvfp4r.format import BLOCK
from nvfp4r.groups import exclusion_problems, matches_any

KV_SCALES = ("k_scale", "v_scale")

# Tensors that change what the stored codes mean, in exports that are not plain NVFP4.
_UNSUPPORTED = ("pre_quant_scale", "weight_zero_point", "input_zero_point", "weight_g_idx")
_EMBEDDINGS = ("embed", "wte", "wpe")
_MATRIX_DTYPES = ("F64", "F32", "BF16", "F16")
_QUANTISED_DTYPES = ("U8", "I8", "F4", "F6_E2M3", "F6_E3M2", "F8_E4M3", "F8_E5M2", "F8_E8M0")


@dataclass(frozen=True)
class ModuleTensors:
    """The stored tensors of one quantised module; `input_scale` is None in W4A16."""

    codes: TensorInfo
    block_scale: TensorInfo
    global_scale: TensorInfo
    input_scale: TensorInfo | None


@dataclass(frozen=True)
class Structure:
    """A checkpoint's tensors, sorted.

    Attributes:
        parameters: by name, in file order; quantised ones as "<module>.weight" at the place of
            their codes. Damaged modules and the scales of modules are left out.
        kv_scales: KV-cache scales, not parameters.
        activations: what configuration and tensors say together.
        unused_input_scales: how many input scales a W4A16 checkpoint carries.
        matrices: of the rotation, stored beside the layers whose inputs are rotated by them; not
            parameters.
        problems: one line each.
        doubtful: those of the problems that are about layers without scales, which engines may
            know how to run.
    """

    parameters: dict[str, TensorInfo | ModuleTensors]
    kv_scales: tuple[TensorInfo, ...]
    activations: Activations
    unused_input_scales: int
    problems: list[str]
    doubtful: frozenset[str] = frozenset()
    matrices: tuple[TensorInfo, ...] = ()


def is_embedding(module: str) -> bool:
    """Whether a module is an embedding by its name; those are never quantised."""
    return any(mark in module for mark in _EMBEDDINGS)


def sort_tensors(
    infos: Mapping[str, TensorInfo], quant: QuantConfig, unreadable: Collection[str]
) -> Structure:
    """Sorts the tensors of a checkpoint and lists every structural problem.

    Args:
        infos: every tensor, in file order.
        quant: the configuration.
        unreadable: names of tensors in files that could not be read; modules that own one are
            left out and not reported a second time.
    """
    names = TENSOR_NAMES[quant.dialect]
    sides = (names.block_scale, names.global_scale, names.input_scale)
    foreign = _foreign_tensors(infos, quant)
    if foreign:
        return Structure({}, (), quant.activations or "none", 0, foreign)
    candidates: dict[str, None] = {}
    has_input_scale: list[str] = []
    for name, info in infos.items():
        module, _, suffix = name.rpartition(".")
        packed = suffix == names.codes and (suffix != "weight" or info.dtype == "U8")
        if module and (packed or suffix in sides):
            candidates[module] = None
        if suffix == names.input_scale:
            has_input_scale.append(module)
    activations = quant.activations or ("nvfp4" if has_input_scale else "none")

    problems: list[str] = []
    doubtful: list[str] = []
    modules: dict[str, ModuleTensors] = {}
    lost = {name.rpartition(".")[0] for name in unreadable}
    for module in candidates:
        found = list(_module_problems(module, infos, quant, activations))
        if module not in lost:
            problems += found
        if not found:
            modules[module] = ModuleTensors(
                infos[f"{module}.{names.codes}"],
                infos[f"{module}.{names.block_scale}"],
                infos[f"{module}.{names.global_scale}"],
                infos[f"{module}.{names.input_scale}"] if activations == "nvfp4" else None,
            )

    owned = {
        f"{module}.{suffix}" for module in candidates for suffix in ("weight", names.codes, *sides)
    }
    parameters: dict[str, TensorInfo | ModuleTensors] = {}
    kv_scales: list[TensorInfo] = []
    matrices: list[TensorInfo] = []
    linears = list(candidates)
    for name, info in infos.items():
        module, _, suffix = name.rpartition(".")
        if quant.transform and module.rpartition(".")[2] == quant.transform.submodule:
            found = list(_matrix_problems(info, candidates))
            problems += found
            matrices += [] if found else [info]
        elif suffix == names.codes and module in modules:
            parameters[f"{module}.weight"] = modules[module]
        elif suffix in KV_SCALES:
            kv_scales.append(info)
        elif name not in owned:
            parameters[name] = info
            found = list(_plain_problems(info, quant))
            problems += found
            doubtful += found
            if suffix == "weight" and len(info.shape) == 2:
                linears.append(module)
    problems += [
        f"{quant.source_file}: {problem}" for problem in exclusion_problems(linears, quant.exclude)
    ]
    problems += _rotation_problems(linears, candidates, quant)
    return Structure(
        parameters=parameters,
        kv_scales=tuple(kv_scales),
        activations=activations,
        unused_input_scales=len(has_input_scale) if activations == "none" else 0,
        problems=problems,
        doubtful=frozenset(doubtful),
        matrices=tuple(matrices),
    )


def _foreign_tensors(infos: Mapping[str, TensorInfo], quant: QuantConfig) -> list[str]:
    """Names that only the other dialect uses; one line for all of them."""
    problems = []
    own = set(vars(TENSOR_NAMES[quant.dialect]).values())
    for dialect, names in TENSOR_NAMES.items():
        marks = {names.codes, names.global_scale, names.input_scale} - own - {"weight"}
        foreign = [name for name in infos if name.rpartition(".")[2] in marks]
        if foreign and dialect != quant.dialect:
            problems.append(
                f"{infos[foreign[0]].file}: {foreign[0]} and {len(foreign) - 1} more are named as "
                f"in {dialect}, but {quant.source_file} says {quant.dialect}; "
                "use the configuration that came with these weights"
            )
    return problems


def _module_problems(
    module: str, infos: Mapping[str, TensorInfo], quant: QuantConfig, activations: Activations
) -> Iterator[str]:
    names = TENSOR_NAMES[quant.dialect]
    suffixes = (names.codes, names.block_scale, names.global_scale, names.input_scale)
    stored = {s: infos[f"{module}.{s}"] for s in suffixes if f"{module}.{s}" in infos}
    first = next(iter(stored.values()))
    if matches_any(module, quant.exclude):
        scales = [info.name for s, info in stored.items() if s != "weight" or info.dtype == "U8"]
        yield (
            f"{first.file}: {', '.join(scales)} stored, but the exclusion list of "
            f"{quant.source_file} covers {module}; remove it from the list if the layer is "
            "quantised, or export again without these tensors"
        )
        return
    codes = stored.get(names.codes)
    if codes is None:
        plain = infos.get(f"{module}.weight")
        instead = f" (there is {plain.name} of dtype {plain.dtype})" if plain else ""
        yield (
            f"{first.file}: {first.name} has no {module}.{names.codes} beside it{instead}; "
            "the export is incomplete, export the model again"
        )
        return
    if quant.dialect == "compressed-tensors" and f"{module}.weight" in infos:
        yield (
            f"{codes.file}: both {codes.name} and {module}.weight stored, need one of them; "
            "export the model again"
        )
    for suffix in suffixes[1:3] if activations == "none" else suffixes[1:]:
        if suffix not in stored:
            # A made-up scale gives NaN or garbage for the inputs that reach this layer only.
            yield (
                f"{codes.file}: {module}.{suffix} is missing, while {codes.name} is there; "
                f"need one for every quantised module ({_kind(quant, activations)}); "
                "fetch or export the checkpoint again"
            )
    yield from _shape_problems(module, stored, names, activations)


def _kind(quant: QuantConfig, activations: Activations) -> str:
    return f"{quant.dialect}, {'W4A4' if activations == 'nvfp4' else 'W4A16'}"


def _shape_problems(
    module: str, stored: Mapping[str, TensorInfo], names: TensorNames, activations: Activations
) -> Iterator[str]:
    codes = stored[names.codes]
    if codes.dtype != "U8" or len(codes.shape) != 2 or 0 in codes.shape:
        yield (
            f"{codes.file}: {codes.name} is {codes.dtype} {list(codes.shape)}, need U8 [N, K/2], "
            f"two codes per byte, as {module} has scales; quantise the layer, or exclude it and "
            "remove its scales"
        )
        return
    N, K = codes.shape[0], 2 * codes.shape[1]
    if K % BLOCK:
        yield (
            f"{codes.file}: {codes.name} has shape {list(codes.shape)}, so K={K}, need a multiple "
            f"of {BLOCK}; export again with {module} excluded"
        )
        return
    block_scale = stored.get(names.block_scale)
    expected = (N, K // BLOCK)
    if block_scale and (block_scale.dtype != "F8_E4M3" or block_scale.shape != expected):
        hint = "export the model again"
        if len(block_scale.shape) == 2 and block_scale.shape[1] and not K % block_scale.shape[1]:
            group = K // block_scale.shape[1]
            if group != BLOCK:
                hint = f"this is group size {group}, export again with group size {BLOCK}"
        yield (
            f"{block_scale.file}: {block_scale.name} is {block_scale.dtype} "
            f"{list(block_scale.shape)}, need F8_E4M3 {list(expected)} (K={K}, one scale per "
            f"{BLOCK}); {hint}"
        )
    scalars = [names.global_scale] + [names.input_scale] * (activations == "nvfp4")
    for suffix in scalars:
        info = stored.get(suffix)
        if info and (info.dtype != "F32" or info.shape not in ((), (1,))):
            yield (
                f"{info.file}: {info.name} is {info.dtype} {list(info.shape)}, need one F32 value "
                "([] or [1]); export the model again"
            )


def _plain_problems(info: TensorInfo, quant: QuantConfig) -> Iterator[str]:
    """What speaks against taking a tensor as an ordinary parameter."""
    module, _, suffix = info.name.rpartition(".")
    excluded = matches_any(module, quant.exclude)
    if suffix in _UNSUPPORTED:
        yield (
            f"{info.file}: {info.name} changes what the weights of {module} mean, which plain "
            "NVFP4 does not; quantise the original model with reset-quantize"
        )
    elif suffix == "weight" and len(info.shape) == 2:
        targeted = "Linear" in quant.targets or matches_any(module, quant.targets)
        if targeted and not excluded and not is_embedding(module):
            yield (
                f"{info.file}: {info.name} is {info.dtype} {list(info.shape)}, but "
                f"{quant.source_file} calls this layer quantised; "
                f"add {module} to the exclusion list, or quantise it"
            )
    elif info.dtype in _QUANTISED_DTYPES and not excluded:
        yield (
            f"{info.file}: {info.name} is {info.dtype} {list(info.shape)} and belongs to no "
            "quantised linear layer; this layout is not supported, "
            "quantise the original model with reset-quantize"
        )


def _matrix_problems(info: TensorInfo, quantised: Collection[str]) -> Iterator[str]:
    """What speaks against taking a tensor as the matrix of a layer's rotation."""
    module, _, suffix = info.name.rpartition(".")
    layer = module.rpartition(".")[0]
    is_matrix = info.dtype in _MATRIX_DTYPES and info.shape == (BLOCK, BLOCK)
    if suffix != "weight" or layer not in quantised or not is_matrix:
        yield (
            f"{info.file}: {info.name} is {info.dtype} {list(info.shape)}, need nothing there, or "
            f"the Hadamard matrix [{BLOCK}, {BLOCK}] of a quantised layer as weight; other "
            "transforms are not supported, quantise the original model with reset-quantize"
        )


def _rotation_problems(
    linears: Collection[str], quantised: Collection[str], quant: QuantConfig
) -> Iterator[str]:
    """Layers where rotation and quantisation do not go together, one line for each kind."""
    if quant.transform is None:
        return
    left_out, plain = [], []
    for module in linears:
        try:
            is_rotated = quant.transform.covers(module, not is_embedding(module))
        except ValueError as error:
            yield f"{quant.source_file}: {error}"
            return
        if module in quantised and not is_rotated:
            left_out.append(module)
        elif module not in quantised and is_rotated:
            plain.append(module)
    unknown = [target for target in quant.transform.named if target not in linears]
    for found, what in (
        (unknown, "targets {}, which is no linear layer here"),
        (left_out, "leaves out {}, which is quantised"),
        (plain, "rotates {}, which is not quantised"),
    ):
        if found:
            yield (
                f"{quant.source_file}: the transform {what.format(found[0])} ({len(found)} such "
                "layers), need the quantised layers, all of them and no others; quantise the "
                "original model with reset-quantize"
            )
