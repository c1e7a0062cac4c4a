"""A transformers model of which one decoder layer at a time has weights.

The model is built without memory for weights. What surrounds the decoder layers (embedding, norms)
is loaded once; layers come and go. To run one of them, the model's own forward runs with the hidden
states put in front of that layer and all before it left out, so masks, positions and other
arguments are those that the model itself makes, whatever its architecture calls them.

This module reads the plan's source and knows transformers; it quantises nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from nvfp4r.checkpoint.dialects import CONFIG_FILE
from nvfp4r.selection import ConversionPlan

_REMEDY = "use a method that needs no calibration, or exclude these layers (--exclude)"
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_SHOWN = 4  # names listed in one message


class NotLayerwiseError(ValueError):
    """A model that transformers can run, but only as a whole.

    Attributes:
        reason: the message without what to do.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; {_REMEDY}")
        self.reason = reason


class _Stop(Exception):  # noqa: N818  (no error: it ends a forward that has done its work)
    """Ends the model's forward."""


@dataclass
class _Step:
    """What the gates do in the forward that is running."""

    index: int = 0  # the layer that runs
    hidden: Tensor | None = None  # its input; None for what the model gives it
    result: Tensor | None = None
    others: int | None = None  # how many None a layer gives beside its result; None for no tuple

    def as_given(self, hidden: Tensor | None) -> Any:
        """Hidden states in the form in which this model's layers give them."""
        return hidden if self.others is None else (hidden, *[None] * self.others)


class _Gate(nn.Module):
    """Stands in a model's list for one decoder layer: leaves it out, or runs it and stops."""

    def __init__(self, layer: nn.Module, index: int, step: _Step) -> None:
        super().__init__()
        self.layer = layer
        self._index = index
        self._step = step

    def __getattr__(self, name: str) -> Any:
        # Some models ask a layer for its kind before they choose its mask.
        if name == "layer":
            return super().__getattr__(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        step = self._step
        hidden = args[0] if args else kwargs["hidden_states"]
        if self._index < step.index - 1:
            return step.as_given(hidden)
        if self._index == step.index - 1:  # the last that is left out
            return step.as_given(step.hidden)
        result = self.layer(*args, **kwargs)
        step.others = None
        if isinstance(result, tuple):
            result, *rest = result
            step.others = len(rest)
            if any(part is not None for part in rest):
                raise NotLayerwiseError(
                    f"{type(self.layer).__name__} gives more than its hidden states to the next "
                    "layer, so layers cannot be run one by one"
                )
        step.result = result
        raise _Stop


class LayerwiseModel:
    """Decoder layers of a source model, run one at a time.

    Args:
        plan: names the source and what is to be quantised.
        device: where everything runs; on a CPU in float32, elsewhere in the dtype of config.json,
            or else of the first stored tensor.

    Attributes:
        device: where it runs.
        prefix: of the decoder layers, such as "model.layers".
        count: how many there are.
        dtype: of weights and hidden states.

    Raises:
        NotLayerwiseError: a model without one list of decoder layers that holds all that is to be
            quantised, whose layers take more than hidden states from each other, with experts that
            transformers fuses, or stored under other names than transformers'.
        ValueError: one that cannot be run as a whole either: of a type that transformers does not
            know as a causal language model, with something to be quantised that is no linear layer
            of it, or of other shapes. Nothing but configuration and headers was read by then.
    """

    def __init__(self, plan: ConversionPlan, device: torch.device) -> None:
        self._plan = plan
        self.device = device
        self._model = _empty_model(plan, device)
        self.dtype = self._model.dtype
        _check_linears(plan, self._model)
        _check_independence(self._model)
        self.prefix, layers = _layer_list(plan, self._model)
        self.count = len(layers)
        self.head = next((name for name in plan.quantised if not self.holds(name)), None)
        self._slots = _stored_slots(plan, self._model)
        self._step = _Step()
        for index in range(self.count):
            layers[index] = _Gate(layers[index], index, self._step)
        self._gates: nn.ModuleList = layers

    def holds(self, module: str) -> bool:
        """Whether a module is part of a decoder layer."""
        return module.startswith(f"{self.prefix}.")

    def modules_of(self, index: int) -> list[str]:
        """The modules of a layer that are to be quantised, in the order of the files."""
        return [n for n in self._plan.quantised if n.startswith(f"{self.prefix}.{index}.")]

    def load_frame(self) -> None:
        """Reads what is outside of the decoder layers, but for an output head of its own."""
        unused = _heads(self._model)  # the head never runs
        for name in self._slots:
            if not self.holds(name) and name.rpartition(".")[0] not in unused:
                self._load(self._model, name, name)
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if not buffer.is_meta:
                    setattr(module, name, buffer.to(self.device))
        self._plan.tensors.close()

    def load_layer(self, index: int) -> None:
        """Reads the weights of a layer."""
        start = f"{self.prefix}.{index}."
        for name in self._slots:
            if name.startswith(start):
                self._load(self.layer(index), name.removeprefix(start), name)
        self._plan.tensors.close()

    def unload_layer(self, index: int) -> None:
        """Gives the memory of a layer back."""
        self.layer(index).to("meta")

    def layer(self, index: int) -> nn.Module:
        """A decoder layer."""
        gate = self._gates[index]
        assert isinstance(gate, _Gate)
        return gate.layer

    def linear(self, module: str) -> nn.Linear:
        """A module of the plan."""
        if not self.holds(module):
            found = self._model.get_submodule(module)
        else:
            index, _, rest = module.removeprefix(f"{self.prefix}.").partition(".")
            found = self.layer(int(index)).get_submodule(rest)
        assert isinstance(found, nn.Linear)
        return found

    def run_layer(self, index: int, row: Tensor, hidden: Tensor | None) -> Tensor:
        """What a layer makes of one row of tokens.

        Args:
            index: the layer; it has to be loaded, and layer 0 has to be the first that is run.
            row: [T] int64, token ids.
            hidden: [1, T, H], what the layer before gave for them; None for layer 0.

        Returns:
            [1, T, H].

        Raises:
            NotLayerwiseError: this model does not run its layers one after the other.
        """
        self._step.index, self._step.hidden = index, hidden
        self._forward(row, f"layer {index} of {self.prefix}")
        result, self._step.result, self._step.hidden = self._step.result, None, None
        assert result is not None
        return result

    def run_to_head(self, row: Tensor, hidden: Tensor) -> None:
        """Runs what is between the last layer and the output head, so that its hooks see inputs.

        Hooks run in the order of their registration, so the caller's have to be there already.
        """
        assert self.head is not None
        self._step.index, self._step.hidden = self.count, hidden
        stop = self.linear(self.head).register_forward_pre_hook(_stop)
        try:
            self._forward(row, self.head)
        finally:
            stop.remove()
            self._step.hidden = None

    def _forward(self, row: Tensor, what: str) -> None:
        with torch.inference_mode():
            try:
                self._model(input_ids=row.to(self.device).unsqueeze(0), use_cache=False)
            except _Stop:
                return
        raise NotLayerwiseError(
            f"{type(self._model).__name__} did not reach {what} in its forward, so it does not run "
            "its layers one after the other"
        )

    def _load(self, root: nn.Module, path: str, name: str) -> None:
        """Puts a stored tensor into the slot `path` below `root`."""
        parent, _, field = path.rpartition(".")
        module = root.get_submodule(parent)
        slot: Tensor = getattr(module, field)
        value = self._plan.tensors.get(name).to(self.device, slot.dtype, copy=True)
        parameter = isinstance(slot, nn.Parameter)
        setattr(module, field, nn.Parameter(value, requires_grad=False) if parameter else value)


def _stop(module: nn.Module, args: tuple[Any, ...]) -> NoReturn:
    raise _Stop


def hidden_bytes(plan: ConversionPlan, rows: Iterable[Tensor], device: torch.device) -> int:
    """Size of what rows of token ids, [T] each, are between two layers.

    From the configuration alone: 0 where it does not say, too little for a model that keeps several
    states of a token.

    Raises:
        ValueError: transformers does not know the model.
    """
    config = _config_of(plan)
    width = getattr(config.get_text_config(decoder=True), "hidden_size", 0)
    return sum(len(row) for row in rows) * width * _dtype_of(plan, config, device).itemsize


def _config_of(plan: ConversionPlan) -> Any:
    """The transformers configuration of a causal language model."""
    where = plan.source / CONFIG_FILE
    model_type = str(plan.config.get("model_type"))
    config: Any = None
    if model_type in CONFIG_MAPPING:
        config = CONFIG_MAPPING[model_type].from_dict(dict(plan.config))
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{where}: model_type is {model_type!r}, which transformers "
            f"{transformers.__version__} does not know as a causal language model, so it cannot be "
            "run; update transformers, or use a method that needs no calibration (and "
            "--activations none)"
        )
    config.name_or_path = str(plan.source)
    return config


def _dtype_of(plan: ConversionPlan, config: Any, device: torch.device) -> torch.dtype:
    """CPUs run bfloat16 several times slower than float32, which holds the same weights."""
    if device.type == "cpu":
        return torch.float32
    if config.dtype is not None:
        return config.dtype
    stored = (info.dtype for info in plan.tensors.infos.values())
    return next((_DTYPES[dtype] for dtype in stored if dtype in _DTYPES), torch.bfloat16)


def _empty_model(plan: ConversionPlan, device: torch.device) -> PreTrainedModel:
    """The model of config.json with its parameters on the meta device, its buffers computed."""
    config = _config_of(plan)
    dtype = _dtype_of(plan, config, device)
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()


def _heads(model: PreTrainedModel) -> set[str]:
    """Names of the output head."""
    head = model.get_output_embeddings()
    return {name for name, module in model.named_modules() if module is head}


def _check_linears(plan: ConversionPlan, model: PreTrainedModel) -> None:
    modules = dict(model.named_modules())
    foreign = [name for name in plan.quantised if not isinstance(modules.get(name), nn.Linear)]
    if foreign:
        why = "are no torch.nn.Linear of"
        if any(".experts." in name for name in foreign):
            why = "are experts, which are one fused parameter in"
        raise ValueError(
            f"{_listed(foreign)} {why} {type(model).__name__}, so their inputs cannot be seen; "
            f"{_REMEDY}"
        )
    for name, info in plan.quantised.items():
        linear = modules[name]
        assert isinstance(linear, nn.Linear)
        if tuple(linear.weight.shape) != info.shape:
            raise ValueError(
                f"{info.file}: {info.name} has shape {list(info.shape)}, but "
                f"{type(model).__name__} needs {list(linear.weight.shape)}; is {CONFIG_FILE} the "
                "one that belongs to these weights?"
            )


def _check_independence(model: PreTrainedModel) -> None:
    config = model.config.get_text_config(decoder=True)
    sharing = getattr(config, "num_kv_shared_layers", None)
    if sharing:
        raise NotLayerwiseError(
            f"the last {sharing} layers of {type(model).__name__} take keys and values of layers "
            "before them (num_kv_shared_layers), so layers cannot be run one by one"
        )


def _layer_list(plan: ConversionPlan, model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers, which holds all that is quantised but for the head."""
    heads = _heads(model)
    inner = [name for name in plan.quantised if name not in heads]
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    held = {name: [x for x in inner if x.startswith(f"{name}.")] for name in lists}
    best = max(lists, key=lambda name: (len(held[name]), -len(name)), default=None)
    outside = inner if best is None else [name for name in inner if name not in held[best]]
    if best is None or outside:
        raise NotLayerwiseError(
            f"{_listed(outside)} are in no list of decoder layers of {type(model).__name__}"
            f"{f' ({best})' if best else ''}, which are calibrated one after the other"
        )
    return best, lists[best]


def _stored_slots(plan: ConversionPlan, model: PreTrainedModel) -> list[str]:
    """Names of stored tensors that the model has a place for, all it needs."""
    slots = model.state_dict()
    stored = [name for name in plan.tensors.infos if name in slots]
    needed = [name for name, _ in model.named_parameters()]
    heads = _heads(model)
    missing = [
        name
        for name in needed
        if name not in plan.tensors.infos and name.rpartition(".")[0] not in heads
    ]
    if missing:
        experts = [name for name in missing if ".experts." in name]
        why = "experts are stored one by one, but fused in transformers" if experts else "missing"
        raise NotLayerwiseError(
            f"{plan.source}: {_listed(experts or missing)}: {why}, so {type(model).__name__} "
            "cannot be run layer by layer"
        )
    for name in stored:
        got, need = plan.tensors.infos[name].shape, tuple(slots[name].shape)
        if got != need:
            raise ValueError(
                f"{plan.source}: {name} has shape {list(got)}, but {type(model).__name__} needs "
                f"{list(need)}; is {CONFIG_FILE} the one that belongs to these weights?"
            )
    return stored


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
