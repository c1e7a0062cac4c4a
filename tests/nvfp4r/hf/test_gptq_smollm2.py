"""GPTQ over the first layers of SmolLM2, on real text: outputs of every layer change less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from nvfp4r.convert import weight_maxima
from nvfp4r.hf.sequential import finished_records, gptq_tensors, work_folder
from nvfp4r.methods import METHODS
from nvfp4r.methods.rotation import quantize_rotated, rotate
from nvfp4r.quantize import global_scale_from_amax, quantize
from nvfp4r.selection import plan_conversion

pytestmark = pytest.mark.model

CPU = torch.device("cpu")
TEXT = Path(__file__).parents[3] / "docs" / "format.md"
ROWS, TOKENS = 6, 256
OTHERS = r"re:model\.layers\.([2-9]|\d\d)\."  # all but the first two layers stay as they are


@pytest.fixture(scope="module")
def rows(smollm2) -> list[Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = torch.tensor(tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"])
    assert len(ids) >= ROWS * TOKENS
    return list(ids[: ROWS * TOKENS].view(ROWS, TOKENS))


@pytest.mark.parametrize("method", ["gptq", "mr-gptq"])
def test_every_output_is_nearer_than_by_rounding_to_nearest(smollm2, rows, tmp_path, method):
    """Over the texts of the calibration, with the inputs that the layers before leave.

    Below plain rounding to nearest for both, and for mr-gptq below that of the rotated weights.
    """
    plan = plan_conversion(smollm2, [OTHERS])
    assert len(plan.quantised) == 14
    maxima = weight_maxima(plan, method=method)
    work = work_folder(tmp_path / "out", plan, rows, CPU, method=method)
    stored, _ = gptq_tensors(plan, rows, CPU, method=method, maxima=maxima, work=work)
    assert {record["tokens"] for record in finished_records(work)} == {ROWS * TOKENS}

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    turn = rotate if METHODS[method].rotation else lambda x: x
    rounded = {name: stored(f"{name}.weight", None) for name in plan.quantised}
    original = {name: model.get_submodule(name).weight.detach().clone() for name in rounded}
    for name, tensor in rounded.items():
        model.get_submodule(name).weight.data.copy_(turn(tensor.dequantize()))
    inputs = seen_inputs(model, rounded, rows)
    plain_maxima = weight_maxima(plan)
    for name, tensor in rounded.items():
        x, weight = inputs[name], original[name]
        truth = x @ weight.T

        def error(product: Tensor, truth: Tensor = truth) -> float:
            return float((product - truth).norm() / truth.norm())

        scale = global_scale_from_amax(plain_maxima[name])
        nearest = quantize(weight, global_scale=scale).dequantize()
        ours = error(turn(x) @ tensor.dequantize().T)
        assert ours < 0.8 * error(x @ nearest.T), name
        if METHODS[method].rotation:
            scale = global_scale_from_amax(maxima[name])
            turned = quantize_rotated(weight, global_scale=scale).dequantize()
            assert ours < 0.8 * error(rotate(x) @ turned.T), name


def seen_inputs(model, names, rows) -> dict[str, Tensor]:
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: seen[name].append(args[0][0])
        )
    with torch.inference_mode():
        for row in rows:
            model(row.unsqueeze(0), logits_to_keep=1)
    return {name: torch.cat(parts) for name, parts in seen.items()}
