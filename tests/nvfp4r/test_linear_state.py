"""What happens to an NVFP4Linear around its arithmetic: loads, moves, casts, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4r.format import NVFP4Tensor
from nvfp4r.linear import NVFP4Linear
from nvfp4r.quantize import quantize

W4A4 = {"input_scale": torch.tensor(0.002), "activations": "nvfp4"}


def random_layer(*, seed=0, **options):
    torch.manual_seed(seed)
    return NVFP4Linear(quantize(torch.randn(24, 64)), torch.randn(24), **options)


@pytest.mark.parametrize("how", ["load_", "load_state_dict"])
@pytest.mark.parametrize("options", [{}, W4A4], ids=["W4A16", "W4A4"])
@pytest.mark.parametrize("keep", [True, False])
def test_a12_a_second_load_leaves_nothing_of_the_first(options, keep, how):
    x = torch.randn(4, 64)
    old = random_layer(seed=1, keep_dequantized=keep, **options)
    weight = quantize(torch.randn(24, 64))
    doubled = NVFP4Tensor(weight.codes, weight.block_scale, 2 * weight.global_scale)
    scale = options and {**options, "input_scale": torch.tensor(0.004)}
    new = NVFP4Linear(doubled, torch.randn(24), keep_dequantized=keep, **scale)
    first = old(x)
    buffers = [old.codes, old.block_scale, old.global_scale, old.bias, old._matrix]
    addresses = [None if b is None else b.data_ptr() for b in buffers]
    if how == "load_":
        old.load_(new.weight, new.bias, new.input_scale)
    else:
        old.load_state_dict(new.state_dict())
    assert torch.equal(old(x), new(x))
    assert not torch.equal(old(x), first)
    # In place, the copy too: a captured graph reads from these addresses.
    assert addresses == [None if b is None else b.data_ptr() for b in buffers]
    assert (old._matrix is buffers[-1]) or not keep


def test_load_resets_the_counter_and_takes_one_scale_for_all_rows():
    layer = NVFP4Linear(
        NVFP4Tensor.fuse([quantize(torch.eye(16)), quantize(0.5 * torch.eye(16))]), **W4A4
    )
    layer(torch.full((1, 16), 100.0))
    assert int(layer.saturated_blocks) == 1
    weight = quantize(torch.randn(32, 16))
    layer.load_(weight, input_scale=torch.tensor(0.002))
    assert int(layer.saturated_blocks) == 0
    assert torch.equal(layer.weight.dequantize(), weight.dequantize())


GOOD = quantize(torch.ones(24, 64))
NAN_SCALE = NVFP4Tensor(
    GOOD.codes, torch.full((24, 4), torch.nan).to(torch.float8_e4m3fn), GOOD.global_scale
)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((GOOD,), ValueError, "got none as new bias, but the layer has one"),
        (
            (GOOD, torch.ones(24), torch.tensor(1.0)),
            ValueError,
            "got one as new input_scale, but the layer has none",
        ),
        ((GOOD, torch.ones(23)), ValueError, r"bias has shape \[23\], need \[24\]"),
        ((GOOD, torch.ones(24, dtype=torch.int32)), TypeError, "bias has dtype torch.int32"),
        ((NAN_SCALE, torch.ones(24)), ValueError, "NaN"),
        (
            (quantize(torch.ones(24, 32)), torch.ones(24)),
            ValueError,
            r"\[24, 32\], need \[24, 64\]",
        ),
        (
            (NVFP4Tensor(GOOD.codes, GOOD.block_scale, torch.ones(24)), torch.ones(24)),
            ValueError,
            "one global_scale per row, this layer holds one",
        ),
    ],
)
def test_loads_that_are_refused_change_nothing(arguments, error, message):
    layer = random_layer(name="mlp.up_proj")
    x = torch.randn(2, 64)
    before = layer(x)
    with pytest.raises(error, match=f"mlp.up_proj.*{message}"):
        layer.load_(*arguments)
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"activations": "fp8"}, ValueError, "activations is 'fp8', need one of"),
        ({"activations": "nvfp4"}, ValueError, "no input_scale, need one"),
        ({"input_scale": torch.tensor(0.0)}, ValueError, "input_scale is 0.0, need a finite"),
        ({"input_scale": torch.tensor(torch.inf)}, ValueError, "input_scale is inf"),
        ({"input_scale": torch.ones(1)}, ValueError, r"input_scale has shape \[1\], need \[\]"),
        ({"input_scale": torch.tensor(1.0).double()}, TypeError, "dtype torch.float64"),
        ({"bias": torch.ones(1, 24)}, ValueError, r"bias has shape \[1, 24\], need \[24\]"),
        ({"weight": NAN_SCALE}, ValueError, "NaN"),
    ],
)
def test_layers_that_cannot_be_made(options, error, message):
    weight = options.pop("weight", GOOD)
    with pytest.raises(error, match=f"^mlp.up_proj: .*{message}"):
        NVFP4Linear(weight, name="mlp.up_proj", **options)


def test_an_input_of_another_size():
    with pytest.raises(ValueError, match=r"up: x has shape \[2, 32\], need \[\.\.\., 64\]"):
        random_layer(name="up")(torch.ones(2, 32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, W4A4], ids=["W4A16", "W4A4"])
def test_casting_a_module_does_not_touch_the_stored_weight(options, dtype):
    model = nn.Sequential(random_layer(**options))
    before = copy.deepcopy(model[0])
    x = torch.randn(3, 64).to(dtype)
    expected = copy.deepcopy(model[0])
    expected.bias = nn.Parameter(expected.bias.to(dtype), requires_grad=False)
    model(x)
    model.to(dtype)
    for name, buffer in model[0].named_buffers():
        assert torch.equal(
            buffer.view(-1).view(torch.uint8), before.get_buffer(name).view(-1).view(torch.uint8)
        ), name
        assert buffer.dtype == before.get_buffer(name).dtype
    assert model[0].bias.dtype == dtype
    assert torch.equal(model(x), expected(x))


def test_moving_drops_the_copy():
    layer = random_layer()
    layer(torch.ones(1, 64))
    assert layer._matrix is not None
    layer.to("meta")
    assert layer._matrix is None
    assert {buffer.device.type for buffer in layer.buffers()} == {"meta"}


def test_a_copy_made_in_inference_mode_serves_autograd_too():
    layer = NVFP4Linear(quantize(torch.eye(16)))
    with torch.inference_mode():
        layer(torch.ones(1, 16))
    x = torch.randn(2, 16, requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 16))


class HostReads(TorchDispatchMode):
    """Records the tensors whose values are read by Python; on an accelerator each is a wait."""

    def __init__(self):
        super().__init__()
        self.read = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        if func in waits:
            self.read.append(args[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("options", [{}, W4A4], ids=["W4A16", "W4A4"])
def test_forward_reads_nothing_back(options, keep):
    layer = random_layer(keep_dequantized=keep, **options)
    with HostReads() as reads:
        layer(torch.randn(4, 64))
        layer(torch.randn(4, 64))
    # quantize_activations checks the input scale where that is free, on the CPU.
    assert all(tensor.data_ptr() == layer.input_scale.data_ptr() for tensor in reads.read)
    assert options or not reads.read
    with HostReads() as reads:
        layer.check_saturation()
    assert len(reads.read) == 1


def test_repr_says_what_it_is():
    assert repr(random_layer(**W4A4)) == (
        "NVFP4Linear(in_features=64, out_features=24, bias=True, weight=NVFP4, "
        "activations=nvfp4, keep_dequantized=True)"
    )
    assert set(random_layer(**W4A4).state_dict()) == {
        "bias",
        "codes",
        "block_scale",
        "global_scale",
        "input_scale",
    }
