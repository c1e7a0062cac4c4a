"""Which scales on input channels a checkpoint keeps, and the tensors that they make.

The scales themselves come from outside (hf/awq.py); here they are tried on a sample of what
entered the layers. A block, attention or MLP, of a decoder layer takes the combination with the
least output error among those under which none of its layers is worse than by round to nearest.

Knows tensors and modules with hooks, not how a model is loaded or run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nvfp4r.checkpoint.dialects import Activations
from nvfp4r.format import NVFP4Tensor
from nvfp4r.methods.folding import FoldPoint, Folds, divided_norm
from nvfp4r.quantize import global_scale_from_amax, quantize, quantize_activations
from nvfp4r.selection import ConversionPlan, module_of

SAMPLE_TOKENS = 512
"""Inputs kept for every point at most, spread evenly over the calibration tokens."""

NO_GAIN = "no scale lowered the output error of its block without raising that of a layer in it"
ALL_ZERO = "its inputs were all zero"


class InputStatistics:
    """Largest magnitude of every input channel, and a sample of the inputs, while it is entered.

    Attributes:
        amax: [K] float32 by module, in the order of first use.

    Args:
        modules: the linear layers to watch, by name.
        tokens: how many will come, for an even sample.
    """

    def __init__(self, modules: Mapping[str, nn.Module], tokens: int) -> None:
        self.amax: dict[str, Tensor] = {}
        self._modules = dict(modules)
        self._stride = -(-tokens // SAMPLE_TOKENS)
        self._seen = dict.fromkeys(modules, 0)
        self._samples: dict[str, list[Tensor]] = {name: [] for name in modules}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> InputStatistics:
        for name, module in self._modules.items():
            self._handles.append(module.register_forward_pre_hook(self._recorder(name)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _recorder(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def record(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0].detach().flatten(0, -2)  # [T, K]
            amax = x.abs().amax(0).float()
            if name in self.amax:
                amax = torch.maximum(self.amax[name], amax)
            self.amax[name] = amax
            first = -self._seen[name] % self._stride
            self._samples[name].append(x[first :: self._stride].cpu())
            self._seen[name] += x.shape[0]

        return record

    def sample(self, module: str) -> Tensor:
        """[S, K] float32, S <= SAMPLE_TOKENS, of the inputs of a watched module."""
        return torch.cat(self._samples[module]).float()

    def check_finite(self) -> None:
        """Refuses inputs that were NaN or infinite.

        Raises:
            ValueError: names the first such module in the order of use, where the fault entered.
        """
        for name, amax in self.amax.items():
            if not bool(torch.isfinite(amax).all()):
                raise ValueError(
                    f"{name}: its input holds NaN or infinite values in calibration, need finite "
                    "activations. Run the model in bfloat16 or float32 if it overflows in "
                    "float16, and check that the checkpoint is intact"
                )


@dataclass(frozen=True)
class Outcome:
    """What `choose` found.

    Attributes:
        folds: the scales that are kept.
        weight_amax: largest magnitude of each scaled weight, shared within fused groups.
        input_amax: float32 [] by module, of what enters the scaled layer.
        errors: by module, squared output error on the sample relative to the squared output: by
            round to nearest, and as chosen.
        unscaled: why the inputs of a module are not scaled, by name.
    """

    folds: Folds
    weight_amax: dict[str, float]
    input_amax: dict[str, Tensor]
    errors: dict[str, tuple[float, float]]
    unscaled: dict[str, str]


def choose(
    plan: ConversionPlan,
    points: Sequence[FoldPoint],
    scales: Mapping[str, Tensor],
    statistics: InputStatistics,
    activations: Activations = "none",
    device: torch.device | str = "cpu",
) -> Outcome:
    """Decides for every point whether its scale is kept.

    Args:
        plan: whose weights these are; they are read block by block.
        points: see `folding.fold_points`.
        scales: [K] float32, > 0, by the first reader of each point that has no obstacle.
        statistics: of the first reader of every point.
        activations: "nvfp4" counts the rounding of inputs too.
        device: where the arithmetic runs.
    """
    all_folds = Folds({}, {}, {})
    outcome = Outcome(all_folds, {}, {}, {}, {})
    for block in _blocks(points):
        weights = _weights(plan, block, device)
        usable = []
        for point in block:
            is_zero = not bool(statistics.amax[point.readers[0]].any())
            reason = ALL_ZERO if is_zero else point.obstacle
            if reason is None:
                usable.append(point)
            outcome.unscaled.update(dict.fromkeys(point.readers, reason or NO_GAIN))

        def tried(kept: Sequence[FoldPoint], block: Any = block, weights: Any = weights) -> _Trial:
            folds = _folds(plan, kept, scales)
            return _try(plan, block, weights, folds, statistics, activations)

        plain = best = tried(())
        for count in range(1, len(usable) + 1):
            for kept in itertools.combinations(usable, count):
                trial = tried(kept)
                is_no_worse = all(trial.errors[name] <= plain.errors[name] for name in weights)
                if is_no_worse and trial.total < best.total:
                    best = trial
        all_folds.columns.update(best.folds.columns)
        all_folds.rows.update(best.folds.rows)
        all_folds.norms.update(best.folds.norms)
        outcome.weight_amax.update(best.weight_amax)
        outcome.input_amax.update(best.input_amax)
        outcome.errors.update({n: (plain.errors[n], best.errors[n]) for n in weights})
        for name in best.folds.columns:
            del outcome.unscaled[name]
    return outcome


def _blocks(points: Sequence[FoldPoint]) -> list[list[FoldPoint]]:
    """Points of one attention or one MLP together: the rows that one scales another reads."""
    blocks: dict[str, list[FoldPoint]] = {}
    for point in points:
        blocks.setdefault(point.readers[0].rpartition(".")[0], []).append(point)
    return list(blocks.values())


def _weights(
    plan: ConversionPlan, block: Sequence[FoldPoint], device: torch.device | str
) -> dict[str, Tensor]:
    names = [name for point in block for name in point.readers]
    return {name: plan.tensors.get(f"{name}.weight").to(device) for name in names}


def _folds(plan: ConversionPlan, kept: Sequence[FoldPoint], scales: Mapping[str, Tensor]) -> Folds:
    """The scales of `kept`; those that go into norms as the norm's dtype can hold them."""
    columns: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    norms: dict[str, Tensor] = {}
    for point in kept:
        scale = scales[point.readers[0]].float().cpu()
        if point.kind == "norm":
            weight = plan.tensors.get(f"{point.taker}.weight")
            norms[point.taker], scale = divided_norm(weight, scale)
        else:
            rows[point.taker] = scale
        columns.update(dict.fromkeys(point.readers, scale))
    return Folds(columns, rows, norms)


@dataclass(frozen=True)
class _Trial:
    folds: Folds
    weight_amax: dict[str, float]
    input_amax: dict[str, Tensor]
    errors: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.errors.values())


def _try(
    plan: ConversionPlan,
    block: Sequence[FoldPoint],
    weights: Mapping[str, Tensor],
    folds: Folds,
    statistics: InputStatistics,
    activations: Activations,
) -> _Trial:
    """Output errors of a block's layers under `folds`, as the unscaled model would see them."""
    own = {n: float(folds.applied(n, weight).abs().amax()) for n, weight in weights.items()}
    weight_amax = dict(own)
    for group in plan.groups:
        if group[0] in own:
            weight_amax.update(dict.fromkeys(group, max(own[name] for name in group)))
    input_amax: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    for point in block:
        first = point.readers[0]
        device = weights[first].device
        columns = folds.columns.get(first)
        channels = statistics.amax[first].cpu()
        amax = (channels if columns is None else channels / columns).amax()
        x = statistics.sample(first).to(device)
        given = x if columns is None else x / columns.to(device)
        if activations == "nvfp4":
            input_scale = global_scale_from_amax(amax, first).to(device)
            given = quantize_activations(given, input_scale)[0] * input_scale
        for name in point.readers:
            weight = weights[name].float()
            scale = global_scale_from_amax(weight_amax[name], name)
            rounded = quantize(folds.applied(name, weight), global_scale=scale, name=name)
            result = given @ rounded.dequantize(torch.float32).T  # [S, N]
            if name in folds.rows:
                result = result * folds.rows[name].to(device)
            wanted = x @ weight.T
            power = float(wanted.double().square().sum())
            error = float((result - wanted).double().square().sum())
            errors[name] = error / power if power else error
            input_amax[name] = amax
    return _Trial(folds, weight_amax, input_amax, errors)


class AwqTensors:
    """What a checkpoint with folded scales stores, tensor by tensor; a `convert.TensorSource`.

    Attributes:
        folds: the scales.
        unscaled: why each other quantised module keeps scale 1, by module name.
    """

    def __init__(
        self, plan: ConversionPlan, outcome: Outcome, device: torch.device | str = "cpu"
    ) -> None:
        self.folds = outcome.folds
        self.unscaled = dict(outcome.unscaled)
        self._scales = {
            name: global_scale_from_amax(outcome.weight_amax[name], name) for name in plan.quantised
        }
        self._device = device

    def __call__(self, name: str, tensor: Tensor) -> Tensor | NVFP4Tensor:
        module = module_of(name)
        if module in self._scales:
            weight = self.folds.applied(module, tensor.to(self._device))
            return quantize(weight, global_scale=self._scales[module], name=module).to("cpu")
        return self.folds.norms.get(module, tensor)
