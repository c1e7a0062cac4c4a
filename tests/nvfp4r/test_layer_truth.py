"""The truth of GPU tests, by the ops on a CPU: right passes, nearly right does not."""

from __future__ import annotations

import pytest
import torch

from nvfp4r import reference
from nvfp4r.methods.rotation import rotate
from nvfp4r.ops import linear
from tests.nvfp4r.layer_truth import MODES, layer_truth, random_layer, random_x

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("M", "N", "K"), [(1, 8, 16), (9, 40, 208)])
def test_a_right_product_passes(M, N, K, mode, dtype):
    weight, layer = random_layer(N, K, dtype, mode, device="cpu")
    x = random_x(M, K, dtype, device="cpu")
    truth, y = layer_truth(x, weight, layer), linear(x, *layer)
    assert truth.excess(y) <= 1
    # It stands still only within the rounding of the result.
    assert bool((truth.limit <= 1.2 * torch.finfo(dtype).eps * (truth.y.abs() + 1)).all())


@pytest.mark.parametrize("mode", MODES)
def test_it_is_that_of_the_reference(mode):
    weight, layer = random_layer(40, 208, torch.bfloat16, mode, device="cpu")
    x = random_x(9, 208, torch.bfloat16, device="cpu")
    values = rotate(x) if layer.rotation else x
    if layer.input_scale is None:
        values, scale = values.bfloat16().double(), 1.0
    else:
        scale = float(layer.input_scale)
        values, _ = reference.quantize_activations(values, layer.input_scale)
    exact = values @ (reference.dequantize(weight) * scale).T + layer.bias.double()
    assert torch.allclose(layer_truth(x, weight, layer).y, exact, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    "change",
    [
        {"bias": None},
        {"alpha": torch.full((40,), 5e-3)},
        {"rotation": "hadamard16"},
        {"input_scale": torch.tensor(8 / 2688)},
    ],
)
def test_another_layer_fails(change):
    weight, layer = random_layer(40, 208, torch.bfloat16, device="cpu")
    x = random_x(9, 208, torch.bfloat16, device="cpu")
    assert layer_truth(x, weight, layer).excess(linear(x, *layer._replace(**change))) > 1


def test_a_missing_column_fails_and_so_does_nan():
    weight, layer = random_layer(40, 208, torch.bfloat16, device="cpu")
    x = random_x(9, 208, torch.bfloat16, device="cpu")
    truth, y = layer_truth(x, weight, layer), linear(x, *layer)
    less = x.clone()
    less[:, 100] = 0
    assert truth.excess(linear(less, *layer)) > 1
    y[3, 3] = float("nan")
    assert not truth.excess(y) <= 1
