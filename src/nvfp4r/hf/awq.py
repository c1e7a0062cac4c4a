"""AWQ (Lin et al. 2023): scales on input channels, searched for by NVIDIA Model-Optimizer.

Model-Optimizer's AWQ-lite looks, for every linear layer, among the scales
activation^alpha / weight^(1 - alpha) for those with the least output error, rounding as `quantize`
does. Layers that read one input share the mean of theirs, as in its exporter. The scales are then
folded into the operation before (methods/folding.py), and a block of a decoder layer keeps them
only where no layer of it has a larger output error than by round to nearest, on a sample of the
calibration tokens. So the result is an ordinary NVFP4 checkpoint.

Holds the whole model in memory, on a CPU in float32. Needs transformers and nvidia-modelopt, both
imported when they are used; writes nothing.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4r.checkpoint.dialects import Activations
from nvfp4r.methods.awq import AwqTensors, InputStatistics, Outcome, choose
from nvfp4r.methods.folding import FoldPoint, fold_points
from nvfp4r.naming import counted, layer_pattern
from nvfp4r.quantize import quantize
from nvfp4r.selection import ConversionPlan

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with how much is done and how much there is in all, in forward passes of one batch."""

_OLDEST_MODELOPT = (0, 47)  # older ones describe quantisers in another way
_BACKEND = "nvfp4r"
_PACK_TOKENS = 2048
_SEARCH_PASSES = 12  # of one batch in the search: unquantised, and alpha = 0, 0.1, .. 1
_PROBE_TOKENS = 64


def require_modelopt() -> None:
    """Raises ImportError, with the command that installs it, if Model-Optimizer is missing or old.

    Importing it takes seconds.
    """
    needed = ".".join(map(str, _OLDEST_MODELOPT))
    try:
        _modelopt()
        found = version("nvidia-modelopt")
    except ImportError as error:
        raise ImportError(
            "--method awq needs NVIDIA Model-Optimizer, which cannot be imported "
            f"({error}); pip install 'nvidia-modelopt>={needed}', or use another --method"
        ) from error
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < _OLDEST_MODELOPT:
        raise ImportError(
            f"--method awq needs NVIDIA Model-Optimizer {needed} or newer, found {found}; "
            f"pip install --upgrade 'nvidia-modelopt>={needed}', or use another --method"
        )


def _modelopt() -> Any:
    with warnings.catch_warnings():
        # It warns of every transformers that is newer than the one it was tested with.
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq
    return mtq


def awq_tensors(
    plan: ConversionPlan,
    rows: Sequence[Tensor],
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    *,
    activations: Activations = "none",
) -> tuple[AwqTensors, dict[str, Tensor] | None]:
    """Runs the model over token rows and finds what to store for every tensor of `plan`.

    Args:
        plan: of a model whose decoder layers are built like Llama's.
        rows: token ids [T] int64 each.
        device: where the model runs.
        progress: called after every pass.
        activations: "nvfp4" asks for the largest inputs of the scaled layers too.

    Returns:
        The tensors, and for W4A4 the largest input of every quantised module, float32 [], as it
        enters the scaled layer.

    Raises:
        ImportError: Model-Optimizer is not installed.
        ValueError: the model is of another architecture, no token, or a NaN or an infinite value
            reached a layer; names it.
    """
    require_modelopt()
    points = fold_points(plan)
    if not any(row.numel() for row in rows):
        raise ValueError("calibration got no token at all, need at least one text; use longer ones")
    model = _load(plan, torch.device(device))
    _require_exact_folds(model, points, next(row for row in rows if row.numel())[:_PROBE_TOKENS])
    packs = _packs(rows)
    total = len(packs) * (1 + _SEARCH_PASSES)
    firsts = [point.readers[0] for point in points]
    watched = {name: model.get_submodule(name) for name in firsts}
    with InputStatistics(watched, sum(row.numel() for row in rows)) as statistics:
        for done, pack in enumerate(packs, start=1):
            _run(model, pack)
            statistics.check_finite()
            if progress is not None:
                progress(done, total)
    counted_on = None if progress is None else partial(_count_on, progress, len(packs), total)
    scales = _searched(model, points, packs, counted_on)
    del model
    outcome = choose(plan, points, scales, statistics, activations, device)
    _report(outcome)
    return AwqTensors(plan, outcome, device), (
        outcome.input_amax if activations == "nvfp4" else None
    )


def _count_on(progress: Progress, before: int, total: int, done: int) -> None:
    progress(before + done, total)


def _load(plan: ConversionPlan, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    # CPUs run bfloat16 several times slower than float32, which holds the same weights.
    dtype = torch.float32 if device.type == "cpu" else "auto"
    model = AutoModelForCausalLM.from_pretrained(
        plan.source, dtype=dtype, local_files_only=True, device_map={"": device}
    ).eval()
    modules = dict(model.named_modules())
    missing = [name for name in plan.quantised if not isinstance(modules.get(name), nn.Linear)]
    if missing:
        raise ValueError(
            f"{missing[0]}: {type(model).__name__} has no linear layer of this name "
            f"({len(missing)} of {len(plan.quantised)}), so awq cannot run it; use another --method"
        )
    return model


def _packs(rows: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Rows one after the other in batches of about `_PACK_TOKENS`: ids and positions, [1, T] each.

    Positions begin anew with every row, by which transformers keeps attention within it.
    """
    packs: list[list[Tensor]] = [[]]
    for row in rows:
        if packs[-1] and sum(map(len, packs[-1])) + len(row) > _PACK_TOKENS:
            packs.append([])
        packs[-1].append(row)
    return [
        (
            torch.cat(pack).unsqueeze(0),
            torch.cat([torch.arange(len(row)) for row in pack]).unsqueeze(0),
        )
        for pack in packs
    ]


def _run(model: Any, pack: tuple[Tensor, Tensor]) -> Tensor:
    """Logits of the last position; one forward pass, without cache or gradients."""
    ids, positions = (part.to(model.device) for part in pack)
    with torch.inference_mode():
        return model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1
        ).logits


def _require_exact_folds(model: Any, points: Sequence[FoldPoint], ids: Tensor) -> None:
    """Folds powers of two everywhere, looks whether the model still says the same, undoes it.

    Raises:
        ValueError: it does not, so that its layers are not joined as their names suggest.
    """
    generator = torch.Generator().manual_seed(0)
    factors = []
    for point in points:
        K = model.get_submodule(point.readers[0]).in_features
        exponents = torch.randint(-1, 2, (K,), generator=generator)
        factors.append(torch.ldexp(torch.ones(K), exponents).to(model.device))
    pack = _packs([ids])[0]
    before = _run(model, pack).float()
    _multiply(model, points, factors)
    after = _run(model, pack).float()
    _multiply(model, points, [1 / factor for factor in factors])
    limit = 1e-3 * float(before.abs().amax())
    difference = float((after - before).abs().amax())
    if not difference <= limit:
        raise ValueError(
            f"{type(model).__name__}: scales folded into its norms and rows change the logits by "
            f"{difference:.3g}, need {limit:.3g} or less, so awq does not fit this architecture; "
            "use another --method"
        )


@torch.no_grad()
def _multiply(model: Any, points: Sequence[FoldPoint], factors: Sequence[Tensor]) -> None:
    for point, factor in zip(points, factors, strict=True):
        if point.obstacle is not None:
            continue
        taker = model.get_submodule(point.taker).weight
        taker /= factor if point.kind == "norm" else factor.unsqueeze(1)
        for name in point.readers:
            weight = model.get_submodule(name).weight
            weight *= factor


def _searched(
    model: Any,
    points: Sequence[FoldPoint],
    packs: Sequence[tuple[Tensor, Tensor]],
    progress: Callable[[int], None] | None,
) -> dict[str, Tensor]:
    """Model-Optimizer's scale for every point that can take one, by its first reader: [K] float32.

    Leaves the model scaled and full of quantisers.
    """
    mtq = _modelopt()
    passes = 0

    def run_all(quantised: Any) -> None:
        nonlocal passes
        cost = 1 if passes == 0 else _SEARCH_PASSES - 1  # the first of two calls searches nothing
        for pack in packs:
            _run(quantised, pack)
            passes += cost
            if progress is not None:
                progress(passes)

    format_ = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
    searched = [point for point in points if point.obstacle is None]
    rules: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for name in (name for point in searched for name in point.readers):
        cfg = {**format_, "backend": _BACKEND}
        rules.append({"quantizer_name": f"{name}.weight_quantizer", "cfg": cfg})
    with _own_rounding(), _quiet():
        mtq.quantize(model, {"quant_cfg": rules, "algorithm": "awq_lite"}, run_all)
    return {point.readers[0]: _mean_scale(model, point) for point in searched}


def _mean_scale(model: Any, point: FoldPoint) -> Tensor:
    """What columns are multiplied by; Model-Optimizer keeps what inputs are multiplied by."""
    quantisers = [model.get_submodule(name).input_quantizer for name in point.readers]
    factors = [quantiser.pre_quant_scale.float().reshape(-1).cpu() for quantiser in quantisers]
    return 1 / torch.stack(factors).mean(0)


@contextmanager
def _own_rounding() -> Iterator[None]:
    """Makes Model-Optimizer round as `quantize` does; its own NVFP4 rounding needs a GPU."""
    from modelopt.torch.quantization.nn import register_quant_backend, unregister_quant_backend

    def rounded(weight: Tensor, quantiser: nn.Module) -> Tensor:
        if not bool(weight.any()):
            return weight
        return quantize(weight).dequantize(weight.dtype)

    register_quant_backend(_BACKEND, rounded)
    try:
        yield
    finally:
        unregister_quant_backend(_BACKEND)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what Model-Optimizer prints away from standard output, where results go."""
    text = io.StringIO()
    with redirect_stdout(text):
        yield
    for line in text.getvalue().splitlines():
        _log.debug("nvidia-modelopt: %s", line)


def _report(outcome: Outcome) -> None:
    reasons: dict[str, list[str]] = {}
    for name, reason in outcome.unscaled.items():
        reasons.setdefault(reason, []).append(layer_pattern(name))
    for reason, names in reasons.items():
        _log.warning("awq: scale 1 for %s: %s", ", ".join(counted(names)), reason)
