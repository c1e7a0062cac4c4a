"""Largest activation that enters each linear layer, measured by running a model over text.

The static input scale of a W4A4 layer is made from these maxima (quantize.py). This module knows
models as callables on token ids; it does not tokenise, choose texts, or make scales.

Padding never enters: a padded row is stripped by its attention mask and run alone, so a text gives
the same maxima whatever batch it came in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nvfp4r.format import BLOCK
from nvfp4r.methods.rotation import Rotation, rotate

TokenBatch = Tensor | Mapping[str, Tensor]
"""Token ids [T] or [B, T], or a mapping with `input_ids` and, where padded, `attention_mask`."""


class ActivationMaxima:
    """Records the largest absolute input of linear modules while it is entered.

    It counts every position that reaches a module, padding too if there is any; `calibrate` keeps
    padding away. The running maxima stay on the modules' devices, nothing is read back until
    `check_finite` or `result`.

    Args:
        modules: the linear layers to watch, by name.
        rotation: take the maxima of the rotated inputs, which is what a rotated layer quantises.

    Raises:
        ValueError: a module is no `torch.nn.Linear`.

    Example:
        >>> layer = nn.Linear(16, 1)
        >>> with ActivationMaxima({"layer": layer}) as maxima:
        ...     _ = layer(torch.full((2, 16), -3.0))
        >>> maxima.result()
        {'layer': tensor(3.)}
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], *, rotation: Rotation | None = None
    ) -> None:
        for name, module in modules.items():
            if not isinstance(module, nn.Linear):
                raise ValueError(
                    f"{name}: is a {type(module).__name__}, need a torch.nn.Linear; only linear "
                    "layers can be calibrated"
                )
        self._modules = dict(modules)
        self._rotation = rotation
        self._handles: list[RemovableHandle] = []
        self._running: dict[str, Tensor] = {}  # float32 [], in the order of first use

    def __enter__(self) -> ActivationMaxima:
        if self._handles:
            raise RuntimeError("ActivationMaxima is already recording; leave the outer block first")
        for name, module in self._modules.items():
            self._handles.append(
                module.register_forward_pre_hook(self._recorder(name), with_kwargs=True)
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _recorder(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Tensor = (args[0] if args else kwargs["input"]).detach()
            if x.numel() == 0:  # an expert that no token was routed to
                return
            if self._rotation is not None:
                x = rotate(x)
            low, high = torch.aminmax(x)  # NaN wins both, so it is seen by check_finite
            amax = torch.maximum(low.abs(), high.abs()).float()
            if name in self._running:
                amax = torch.maximum(self._running[name], amax)
            self._running[name] = amax

        return record

    def check_finite(self) -> None:
        """Refuses activations that were NaN or infinite.

        Raises:
            ValueError: names the first such module in the order of use, where the fault entered.
        """
        bad = [name for name, amax in self._running.items() if not torch.isfinite(amax)]
        if bad:
            raise ValueError(
                f"{bad[0]}: its input holds {float(self._running[bad[0]])}, need finite "
                f"activations ({len(bad)} of {len(self._modules)} layers are affected, this one "
                "first). Run the model in bfloat16 or float32 if it overflows in float16, and "
                "check that the checkpoint is intact"
            )

    def result(self) -> dict[str, Tensor]:
        """The maxima, float32 [] on the CPU, in the order of `modules`.

        Raises:
            ValueError: a module saw no token, or a non-finite activation; names it.
        """
        unseen = [name for name in self._modules if name not in self._running]
        if unseen:
            shown = ", ".join(unseen[:8]) + (", ..." if len(unseen) > 8 else "")
            raise ValueError(
                f"{len(unseen)} of {len(self._modules)} layers saw no token, need at least one "
                f"each: {shown}. Use more or other calibration texts (--calib-samples, "
                "--calib-data), or exclude these layers (--exclude)"
            )
        self.check_finite()
        return {name: torch.tensor(float(self._running[name])) for name in self._modules}


def calibrate(
    model: nn.Module,
    token_batches: Iterable[TokenBatch],
    module_names: Sequence[str],
    progress: Callable[[int, int], None] | None = None,
    *,
    rotation: Rotation | None = None,
) -> dict[str, Tensor]:
    """Runs `model` over token ids and returns the largest absolute input of each named layer.

    Every row is run alone, without padding, cache or gradients. Texts are not cut: a row longer
    than the model's context is the caller's business.

    Args:
        model: called as `model(input_ids=[1, T] int64)`, in eval mode; a transformers causal
            language model.
        token_batches: ids [T] or [B, T], or mappings with `input_ids` and, if rows are padded,
            `attention_mask` of the same shape (0 or False for padding, on either side).
        module_names: names of `torch.nn.Linear` modules within `model`.
        progress: called after each row with (rows done, tokens done).
        rotation: take the maxima of the rotated inputs, for methods that rotate.

    Returns:
        float32 [] on the CPU for each name, in the order of `module_names`; 0 for a layer that only
        saw zeros.

    Raises:
        TypeError: ids that are not integers.
        ValueError: an unknown module name, one that is no linear layer or whose input size is not a
            multiple of 16, a model in training mode, no token at all, a mask that does not fit, a
            layer that saw no token, or a non-finite activation. Names the layer.
    """
    modules = _named_linears(model, module_names)
    if model.training:
        raise ValueError(
            "the model is in training mode, need eval mode, as dropout would change the "
            "activations; call model.eval() first"
        )
    device = next(model.parameters()).device
    options = _forward_options(model, modules.values())
    rows_done = tokens_done = 0
    maxima = ActivationMaxima(modules, rotation=rotation)
    with torch.inference_mode(), maxima:
        for batch in token_batches:
            for row in unpadded_rows(batch):
                model(input_ids=row.to(device).unsqueeze(0), **options)
                maxima.check_finite()
                rows_done += 1
                tokens_done += row.numel()
                if progress is not None:
                    progress(rows_done, tokens_done)
    if not tokens_done:
        raise ValueError(
            "calibration got no token at all, need at least one text; check --calib-data and that "
            "attention masks are 1 on real tokens"
        )
    return maxima.result()


def unpadded_rows(batch: TokenBatch) -> Iterator[Tensor]:
    """The rows of a batch as [T] int64 each, without their padding; empty rows are left out.

    Args:
        batch: ids [T] or [B, T], or a mapping with `input_ids` and optionally `attention_mask`.

    Raises:
        TypeError: ids that are not integers.
        ValueError: no `input_ids`, more than two dimensions, or a mask of another shape or with
            values other than 0 and 1.
    """
    if isinstance(batch, Tensor):
        ids, mask = batch, None
    else:
        if "input_ids" not in batch:
            raise ValueError(f"a token batch has keys {sorted(batch)}, need input_ids")
        ids, mask = batch["input_ids"], batch.get("attention_mask")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"input_ids have dtype {ids.dtype}, need integer token ids")
    if ids.ndim not in (1, 2):
        raise ValueError(f"input_ids have shape {list(ids.shape)}, need [T] or [B, T]")
    if mask is None:
        mask = torch.ones_like(ids)
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}, need {list(ids.shape)}, that of "
            "input_ids"
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask holds values other than 0 and 1; need 1 on real tokens")
    if ids.ndim == 1:
        ids, mask = ids.unsqueeze(0), mask.unsqueeze(0)
    for row, keep in zip(ids, mask, strict=True):
        kept = row[keep.bool()].long()
        if kept.numel():
            yield kept


def _named_linears(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """The named modules, checked as far as this needs no data."""
    if not names:
        raise ValueError("calibration got no layer names, need at least one")
    found = dict(model.named_modules(remove_duplicate=False))
    unknown = [name for name in names if name not in found]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown[:8])}: no such module in {type(model).__name__} "
            f"({len(unknown)} of {len(names)} names); need names as in model.named_modules()"
        )
    for name in names:
        K = getattr(found[name], "in_features", None)
        if isinstance(K, int) and K % BLOCK:
            raise ValueError(
                f"{name}: has K={K} inputs, need a multiple of {BLOCK}; exclude this layer"
            )
    return {name: found[name] for name in names}


def _forward_options(model: nn.Module, watched: Iterable[nn.Module]) -> dict[str, Any]:
    """Arguments that spare work which no watched layer sees, as far as `model` takes them."""
    options: dict[str, Any] = {"use_cache": False}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None and not any(module is head for module in watched):
        options["logits_to_keep"] = 1  # logits of all positions are the largest tensor of a run
    accepted = inspect.signature(model.forward).parameters
    return {name: value for name, value in options.items() if name in accepted}
