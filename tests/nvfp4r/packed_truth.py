"""What packed layers and models have to compute, and how far off they may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nvfp4r import reference
from nvfp4r.format import NVFP4Tensor
from nvfp4r.linear import NVFP4Linear
from tests.nvfp4r.toy_models import VOCAB, toy_model

ROUNDED = 2.0**-24
"""Relative error of an addition that rounds to float32."""
TRUNCATED = 2.0**-23
"""The same where bits are cut off, as in a tensor core."""

PATH = 2 * 18 + 3
"""Roundings on the longest way through a toy model with two layers, embedding to logits: in each
layer 2 norms of 2, 3 products in a row and 1 after SiLU, 3 of the rotary embedding, 2 of the
attention, 2 of SiLU and its product, 2 sums with the residual, 1 to spare; then norm and head."""


def assert_linear(
    y: Tensor,
    x: Tensor,
    weight: NVFP4Tensor,
    bias: Tensor | None = None,
    input_scale: Tensor | None = None,
    *,
    addition: float = ROUNDED,
) -> None:
    """Every element of a packed layer's y within the error that its own sum allows.

    The K products are exact in float32: 11 + 6 significant bits at most. Summing them in any order
    costs K a sum|p|, with a the error of an addition; making alpha of two scales, applying it and
    adding the bias, in x's dtype, cost 2**-24 each of what they touch. The cast costs half a unit
    in the last place of that dtype: a relative 2**-8 (bfloat16), 2**-11 (float16), or half its
    smallest subnormal. 1.01 covers the terms of second order.
    """
    K = x.shape[-1]
    rows = reference.dequantize(weight)
    values = x.detach().cpu().double()
    if input_scale is not None:
        values, _ = reference.quantize_activations(x.cpu(), input_scale.cpu())
        rows = rows * float(input_scale)
    exact = values @ rows.T
    magnitude = values.abs() @ rows.abs().T
    if bias is not None:
        rounded = bias.detach().cpu().to(x.dtype).double()
        exact, magnitude = exact + rounded, magnitude + rounded.abs()
    half_unit = torch.finfo(y.dtype).eps / 2 * exact.abs()
    tiny = 2.0**-25 if y.dtype == torch.float16 else 2.0**-134
    bound = 1.01 * ((K * addition + 4 * ROUNDED) * magnitude + half_unit) + tiny
    error = (y.detach().cpu().double() - exact).abs()
    assert y.dtype == x.dtype
    assert y.shape == exact.shape
    assert bool((error <= bound).all()), f"{float((error / bound).max()):.2f} times the bound"


@contextmanager
def checked_layers(
    model: nn.Module,
    tensors: Mapping[str, Tensor | NVFP4Tensor],
    *,
    addition: float = ROUNDED,
) -> Iterator[dict[str, int]]:
    """Checks what every packed layer makes of the x it gets; counts the calls of each by name."""
    calls: dict[str, int] = {}
    hooks = []
    for name, layer in model.named_modules():
        if not isinstance(layer, NVFP4Linear):
            continue
        assert layer.packed_dtype is not None, f"{name} is not packed"

        def check(layer: NVFP4Linear, inputs: tuple[Tensor], y: Tensor, name: str = name) -> None:
            weight = tensors[f"{name}.weight"]
            scale = layer.input_scale if layer.activations == "nvfp4" else None
            assert_linear(y, inputs[0], weight, layer.bias, scale, addition=addition)
            calls[name] = calls.get(name, 0) + 1

        hooks.append(layer.register_forward_hook(check))
    yield calls
    for hook in hooks:
        hook.remove()


def logits_bound(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., 1]: how far a 16-bit model's logits [..., V] may be from float32 ones, as a norm.

    Every result on the way is rounded once, which changes it by a relative 2**-8 (bfloat16) or
    2**-11 (float16) at most, and the norms before each branch keep its relative error from growing:
    that many roundings, one after the other and all in one direction, add up to PATH times as much.
    """
    return PATH * torch.finfo(dtype).eps / 2 * truth.norm(dim=-1, keepdim=True)


def assert_logits(got: Tensor, truth: Tensor) -> None:
    """16-bit logits against float32 ones, [..., V]."""
    error = (got.cpu().double() - truth.double()).norm(dim=-1, keepdim=True)
    bound = logits_bound(truth.double(), got.dtype)
    assert bool((error <= bound).all()), f"{float((error / bound).max()):.2f} times the bound"


def separated_model(kind: str, dtype: torch.dtype) -> nn.Module:
    """A toy that goes from token t to t + 1, whatever its layers add, by a wide margin.

    Embeddings are the rows of a Hadamard matrix and their negatives, so any two are orthogonal or
    opposite; row t + 1 of the head is embedding t.
    """
    model = toy_model(kind, dtype=dtype)
    rows = torch.ones(1, 1)
    while rows.shape[0] < VOCAB // 2:
        rows = torch.cat((torch.cat((rows, rows), 1), torch.cat((rows, -rows), 1)))
    embeddings = torch.cat((rows, -rows)).to(dtype)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.copy_(embeddings.roll(1, dims=0))
    return model


def assert_separated(truth: Tensor, dtype: torch.dtype) -> None:
    """The largest logit is ahead by more than two logits can be off together."""
    best = truth.topk(2, dim=-1).values
    margin = (best[..., :1] - best[..., 1:]).double()
    assert bool((margin > 2 * logits_bound(truth.double(), dtype)).all())
