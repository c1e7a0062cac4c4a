"""The part of `reset-quantize` that runs the model: calibration texts, and what comes of them.

Imported when it is needed: transformers takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from torch import Tensor

from nvfp4r.calibration import calibrate
from nvfp4r.checkpoint.dialects import Activations
from nvfp4r.console import count_progress, format_bytes, notes, step_progress
from nvfp4r.convert import TensorSource
from nvfp4r.hf import awq, sequential
from nvfp4r.hf.hidden_states import require_room
from nvfp4r.hf.layers import NotLayerwiseError, hidden_bytes
from nvfp4r.hf.maxima import input_maxima
from nvfp4r.methods import Method, gptq
from nvfp4r.methods.folding import fold_points
from nvfp4r.selection import ConversionPlan
from nvfp4r.work_folder import WorkFolder
from reset.cli.source_model import load_source_model, load_tokenizer, token_rows
from reset.texts import read_texts


def check_method_fits(plan: ConversionPlan, method: Method) -> str | None:
    """Refuses a method that cannot run this model over texts, or whose packages are missing.

    Reads nothing but what the plan holds.

    Returns:
        For a method that only measures inputs: why it has to load the whole model, or None.

    Raises:
        ValueError: another architecture is needed; names what does not fit.
        ImportError: a package is missing.
    """
    if method.calibrated and method.name not in gptq.METHODS:
        fold_points(plan)
        awq.require_modelopt()
        return None
    try:
        sequential.check_architecture(plan)
    except NotLayerwiseError as error:
        if method.calibrated:
            raise
        return error.reason
    return None


def calibration_rows(
    plan: ConversionPlan, data: str, samples: int, max_tokens: int, method: Method
) -> list[Tensor]:
    """Token ids of the calibration texts; says so if there is less of them than asked for.

    Raises:
        ValueError: all texts together are shorter than one sequence, and the method chooses codes
            by them. The largest inputs, which W4A4 needs of any method, are measured nevertheless.
    """
    context = plan.config.get("max_position_embeddings")
    if isinstance(context, int):
        max_tokens = min(max_tokens, context)
    rows = token_rows(read_texts(data, samples), load_tokenizer(plan.source), max_tokens)
    total = sum(len(row) for row in rows)
    if method.calibrated and total < max_tokens:
        raise ValueError(
            f"--calib-data {data}: its texts have {total} tokens together, less than one sequence "
            f"of {max_tokens}, from which --method {method.name} cannot learn what inputs are; "
            f"give more text, or a --calib-tokens of at most {total} to try it"
        )
    if len(rows) < samples:
        notes().print(f"{escape(data)} holds {len(rows)} texts; all are used", soft_wrap=True)
    longest = max(len(row) for row in rows)
    if longest < max_tokens:
        notes().print(
            f"the longest text of {escape(data)} has {longest} tokens, fewer than {max_tokens}; "
            f"what there is is used, {total:,} tokens in all",
            soft_wrap=True,
        )
    return rows


@dataclass(frozen=True)
class Calibration:
    """What running the model over texts is to give.

    Attributes:
        rows: token ids [T] int64 of each text.
        device: where the model runs.
        activations: "nvfp4" asks for the largest inputs too.
        work: finished layers, of methods that keep them.
        damping: of gptq and mr-gptq.
        folder: whose disk takes hidden states of the texts.
        why_whole: why the model cannot be run layer by layer, for methods that do without.
    """

    plan: ConversionPlan
    method: Method
    rows: list[Tensor]
    device: torch.device
    activations: Activations
    damping: float
    work: WorkFolder | None
    folder: Path
    why_whole: str | None

    @classmethod
    def begin(
        cls,
        plan: ConversionPlan,
        method: Method,
        rows: list[Tensor],
        device: torch.device,
        *,
        output: Path,
        activations: Activations,
        damping: float | None,
        why_whole: str | None,
    ) -> Calibration:
        """Finds the finished layers of the same command, if it was ended before.

        Args:
            why_whole: from `check_method_fits`.

        Raises:
            ValueError: they are of a command with other settings.
        """
        damping = gptq.DAMPING if damping is None else damping
        work = None
        if method.name in gptq.METHODS:
            work = sequential.work_folder(
                output,
                plan,
                rows,
                device,
                method=method.name,
                activations=activations,
                damping=damping,
            )
        return cls(plan, method, rows, device, activations, damping, work, output.parent, why_whole)

    def require_room(self, layers_bytes: int) -> None:
        """Looks whether the disk has room for what is kept there while the model runs.

        Args:
            layers_bytes: of finished layers, for methods that keep them.

        Raises:
            OSError: it has not; says how much is needed.
        """
        if self.why_whole is None and (self.work is not None or not self.method.calibrated):
            hidden = hidden_bytes(self.plan, self.rows, self.device)
            require_room(self.folder, hidden, layers_bytes)

    def run(
        self, maxima: Mapping[str, float]
    ) -> tuple[TensorSource | None, dict[str, Tensor] | None]:
        """What to store, for calibrated methods, and the largest inputs, for W4A4."""
        if self.work is not None:
            if self.work.path.exists():
                notes().print(
                    f"going on with the finished layers in {escape(str(self.work.path))}",
                    soft_wrap=True,
                )
            with step_progress("calibrating", "layers") as step:
                return sequential.gptq_tensors(
                    self.plan,
                    self.rows,
                    self.device,
                    method=self.method.name,
                    maxima=maxima,
                    work=self.work,
                    activations=self.activations,
                    damping=self.damping,
                    progress=step,
                )
        if self.method.calibrated:
            with step_progress("calibrating", "passes") as step:
                return awq.awq_tensors(
                    self.plan,
                    self.rows,
                    self.device,
                    lambda done, total: step("", done, total),
                    activations=self.activations,
                )
        return None, self.input_maxima()

    def input_maxima(self) -> dict[str, Tensor]:
        """The largest inputs of the model as it is, layer by layer where that can be done."""
        reason = self.why_whole
        if reason is None:
            try:
                with step_progress("calibrating", "layers") as step:
                    return input_maxima(
                        self.plan,
                        self.rows,
                        self.device,
                        self.folder,
                        rotation=self.method.rotation,
                        progress=step,
                    )
            except NotLayerwiseError as error:  # which only its first layers tell
                reason = error.reason
        notes().print(
            f"[yellow]note:[/yellow] to measure its inputs, the whole model is loaded, "
            f"{format_bytes(self.whole_bytes())}: {escape(reason)}",
            soft_wrap=True,
        )
        model = load_source_model(self.plan.source, self.device)
        with count_progress("calibrating", len(self.rows), "texts") as advance:
            return calibrate(
                model,
                self.rows,
                list(self.plan.quantised),
                lambda done, tokens: advance(done),
                rotation=self.method.rotation,
            )

    def whole_bytes(self) -> int:
        """What the whole model takes in memory, as `load_source_model` loads it."""
        if self.device.type != "cpu":
            return self.plan.source_bytes
        return 4 * sum(math.prod(info.shape) for info in self.plan.tensors.infos.values())

    def report(self, data: str) -> dict[str, Any]:
        """Its part of the report; to be asked for before `finish`."""
        found: dict[str, Any] = {
            "data": data,
            "samples": len(self.rows),
            "tokens": sum(row.numel() for row in self.rows),
        }
        if self.work is not None:
            found["damping"] = self.damping
            found["inputs"] = sequential.finished_records(self.work)
        return found

    def finish(self) -> None:
        """Removes the finished layers, once the checkpoint is whole."""
        if self.work is not None:
            self.work.remove()
