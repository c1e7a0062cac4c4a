"""What enters the linear layers of a model that is run: who shares it, how to see it, its maxima.

This module registers hooks and computes nothing else with what they see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nvfp4r.methods.rotation import Rotation, rotate


@dataclass(frozen=True)
class Unit:
    """Layers that read the same input: a fused group, or a layer alone."""

    modules: tuple[str, ...]

    @property
    def name(self) -> str:
        parent, _, first = self.modules[0].rpartition(".")
        rest = [module.rpartition(".")[2] for module in self.modules[1:]]
        return f"{parent}.{{{','.join([first, *rest])}}}" if rest else self.modules[0]


def units_of(modules: Sequence[str], groups: Sequence[tuple[str, ...]]) -> list[Unit]:
    """The units of some modules, in the order of their first members.

    Args:
        groups: fused groups, whole ones of which are among `modules`.
    """
    group_of = {module: group for group in groups for module in group}
    return [Unit(members) for members in dict.fromkeys(group_of.get(m, (m,)) for m in modules)]


@contextmanager
def watching(
    linears: Mapping[Unit, nn.Linear],
    rotation: Rotation | None,
    see: Callable[[Unit, Tensor], None],
) -> Iterator[None]:
    """Hands the inputs of each unit to `see`, after the rotation, whenever the model runs.

    Args:
        linears: one member of each unit.
    """

    def hook_of(unit: Unit) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            see(unit, rotated(args[0] if args else kwargs["input"], rotation))

        return hook

    handles: list[RemovableHandle] = []
    try:
        for unit, linear in linears.items():
            handles.append(linear.register_forward_pre_hook(hook_of(unit), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


class InputMaxima:
    """Largest magnitudes of what enters the layers of a part."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self._running: dict[Unit, Tensor] = {}  # float32 [], on the device

    def add(self, unit: Unit, x: Tensor) -> None:
        if x.numel():
            low, high = torch.aminmax(x.detach())  # NaN wins both, so it is seen by result()
            amax = torch.maximum(low.abs(), high.abs()).float()
            before = self._running.get(unit)
            self._running[unit] = amax if before is None else torch.maximum(before, amax)

    def result(self) -> dict[Unit, Tensor]:
        """float32 [] on the CPU for each unit.

        Raises:
            ValueError: a layer saw no token, or a value that is not finite; names it.
        """
        found = {unit: amax.cpu() for unit, amax in self._running.items()}  # in the order of use
        for unit, amax in found.items():
            if not bool(torch.isfinite(amax)):
                raise ValueError(
                    f"{unit.name}: its calibration inputs reach {float(amax)}, need finite ones "
                    "(this is the first such layer). Run the model in bfloat16 or float32 if it "
                    "overflows in float16, and check that the checkpoint is intact"
                )
        for unit in self.units:
            if unit not in found:
                raise ValueError(
                    f"{unit.name}: saw no token, so there is no scale for its inputs; use more or "
                    "other calibration texts (--calib-samples, --calib-data), or exclude it "
                    "(--exclude)"
                )
        return {unit: found[unit] for unit in self.units}


def rotated(x: Tensor, rotation: Rotation | None) -> Tensor:
    """`x` in the basis in which it is quantised."""
    return x if rotation is None else rotate(x)
