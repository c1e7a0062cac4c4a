"""Largest inputs of a model's linear layers, measured decoder layer by decoder layer.

What calibration.py finds on a whole model, with one layer in memory at a time: the same forward
passes, so the same values. The texts run through a layer once and on to the next; what they are in
between waits in memory or on disk (hidden_states.py). Nothing is quantised here, and nothing kept
of a run that was ended: its texts would have to run through all layers again anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from nvfp4r.hf.hidden_states import HiddenStates, require_room
from nvfp4r.hf.inputs import InputMaxima, Unit, watching
from nvfp4r.hf.layers import LayerwiseModel, hidden_bytes
from nvfp4r.methods.rotation import Rotation
from nvfp4r.selection import ConversionPlan

Progress = Callable[[str, float, int], None]
"""Called with the layer at work, layers done (with the share of the one at work) and in all."""


def input_maxima(
    plan: ConversionPlan,
    rows: Sequence[Tensor],
    device: torch.device,
    folder: Path,
    *,
    rotation: Rotation | None = None,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Runs a source model over texts, one decoder layer at a time.

    Args:
        plan: names the source and what is to be quantised.
        rows: token ids of the calibration texts, [T] int64 each; each runs alone, without padding.
        device: where everything runs; in the dtype of `LayerwiseModel`.
        folder: whose disk takes the hidden states that are too many for memory.
        rotation: take the maxima of the rotated inputs, for methods that rotate.

    Returns:
        float32 [] on the CPU for each quantised module, in the order of the plan; 0 for one that
        only saw zeros.

    Raises:
        NotLayerwiseError: a model that can only be run as a whole.
        ValueError: no token; a model that cannot be run at all; a layer that saw no token, or NaN
            or infinite inputs. Names it.
        OSError: the disk has no room for the hidden states.
    """
    rows = [row for row in rows if len(row)]
    if not rows:
        raise ValueError("calibration got no token at all, need at least one text; use longer ones")
    model = LayerwiseModel(plan, device)
    require_room(folder, hidden_bytes(plan, rows, device))
    model.load_frame()
    last = model.count if model.head is not None else _last_layer(model)
    found: dict[Unit, Tensor] = {}

    def advance(part: str, done: int, text: int) -> None:
        if progress is not None:
            progress(part, done + (text + 1) / len(rows), last + 1)

    with HiddenStates(folder, device) as hidden:
        for index in range(min(last + 1, model.count)):
            model.load_layer(index)
            with _watched(model, model.modules_of(index), rotation) as maxima:
                for i, row in enumerate(rows):
                    result = model.run_layer(index, row, hidden.get(i))
                    if index < last:
                        hidden.put(i, result)
                    advance(f"{model.prefix}.{index}", index, i)
            model.unload_layer(index)
            found |= maxima.result()
        if model.head is not None:
            with _watched(model, [model.head], rotation) as maxima:
                for i, row in enumerate(rows):
                    state = hidden.get(i)
                    assert state is not None
                    model.run_to_head(row, state)
                    advance(model.head, last, i)
            found |= maxima.result()
    by_module = {unit.name: amax for unit, amax in found.items()}
    return {name: by_module[name] for name in plan.quantised}


def _last_layer(model: LayerwiseModel) -> int:
    """The last one with something to be quantised."""
    return max(index for index in range(model.count) if model.modules_of(index))


@contextmanager
def _watched(
    model: LayerwiseModel, modules: Sequence[str], rotation: Rotation | None
) -> Iterator[InputMaxima]:
    """Maxima of each module's own inputs; engines fuse layers by name, whatever these read."""
    maxima = InputMaxima([Unit((module,)) for module in modules])
    linears = {unit: model.linear(unit.modules[0]) for unit in maxima.units}
    with watching(linears, rotation, maxima.add):
        yield maxima
