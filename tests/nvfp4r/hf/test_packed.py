"""load_model with packed weights, on a CPU: every layer, whole models, and who decides to pack."""

from __future__ import annotations

import logging
import weakref

import pytest
import torch

from nvfp4r.calibration import calibrate
from nvfp4r.checkpoint import NVFP4Checkpoint
from nvfp4r.format import NVFP4Tensor
from nvfp4r.hf import load_model, saturation
from nvfp4r.hf.load import _packing_dtype
from nvfp4r.jit import UnsupportedGPUError
from nvfp4r.linear import NVFP4Linear
from nvfp4r.quantize import global_scale_from_amax
from tests.nvfp4r.packed_truth import (
    assert_logits,
    assert_separated,
    checked_layers,
    separated_model,
)
from tests.nvfp4r.toy_models import dequantised, linear_names, save_quantised, token_ids, toy_model

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
both_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def logits(model, ids):
    with torch.inference_mode():
        return model(input_ids=ids).logits


def layers_of(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, NVFP4Linear)}


def input_scales(model):
    names = linear_names(model)
    amax = calibrate(model, [token_ids(2, 24)], names)
    return {name: global_scale_from_amax(amax[name], name) for name in names}


@both_dtypes
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_logits_are_near_those_of_the_dequantised_float32_model(tmp_path, kind, dtype):
    model = toy_model(kind, dtype=dtype)
    tensors = save_quantised(model, tmp_path / "q")
    truth = logits(dequantised(model, tensors, torch.float32), token_ids(2, 11))
    loaded = load_model(tmp_path / "q", packed=True)
    with checked_layers(loaded, tensors) as calls:
        got = logits(loaded, token_ids(2, 11))
    assert calls == dict.fromkeys(linear_names(model), 1)
    assert {layer.packed_dtype for layer in layers_of(loaded).values()} == {got.dtype} == {dtype}
    assert_logits(got, truth)


@both_dtypes
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_w4a4_layers_use_the_stored_scales_and_count(tmp_path, kind, dtype):
    model = toy_model(kind)
    scales = input_scales(model)
    clipped = "model.layers.1.mlp.down_proj"
    scales[clipped] = scales[clipped] / 4096
    tensors = save_quantised(model, tmp_path / "q", input_scales=scales)
    loaded = load_model(tmp_path / "q", dtype=dtype, packed=True)
    with checked_layers(loaded, tensors) as calls:
        logits(loaded, token_ids(2, 24))
    assert calls == dict.fromkeys(linear_names(model), 1)
    for name, layer in layers_of(loaded).items():
        assert layer.activations == "nvfp4"
        assert torch.equal(layer.input_scale, scales[name])
    assert saturation(loaded)[clipped] > 0


@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", torch.bfloat16), ("qwen3", torch.float16)], ids=["bf16", "f16"]
)
def test_greedy_generation_where_logits_are_well_apart(tmp_path, kind, dtype):
    model = separated_model(kind, dtype)
    tensors = save_quantised(model, tmp_path / "q")
    plain = dequantised(model, tensors, torch.float32)
    loaded = load_model(tmp_path / "q", packed=True)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = plain.generate(token_ids(2, 7), **options)
    assert_separated(logits(plain, expected), dtype)
    with checked_layers(loaded, tensors) as calls:
        got = loaded.generate(token_ids(2, 7), **options)
    assert torch.equal(got, expected)
    assert set(calls.values()) == {8}  # the prompt, then a token at a time


def test_one_matrix_is_unpacked_at_a_time(tmp_path, monkeypatch):
    model = toy_model("llama", dtype=torch.bfloat16)
    save_quantised(model, tmp_path / "q")
    read, alive_at_a_read = [], []

    def watched_items(self):
        for name in self.names():
            alive_at_a_read.append(sum(codes() is not None for codes in read))
            box = [self[name]]
            if isinstance(box[0], NVFP4Tensor):
                read.append(weakref.ref(box[0].codes))
            yield name, box.pop()

    monkeypatch.setattr(NVFP4Checkpoint, "items", watched_items)
    load_model(tmp_path / "q", packed=True)
    assert len(read) == 14
    assert max(alive_at_a_read) == 0
    # The count can see more: without packing, a model keeps them all.
    read.clear()
    load_model(tmp_path / "q", packed=False)
    assert max(alive_at_a_read) == 13  # when the last one is read


@pytest.mark.parametrize("packed", [None, False])
def test_a_cpu_model_is_packed_on_demand_alone(tmp_path, packed):
    save_quantised(toy_model("llama", dtype=torch.bfloat16), tmp_path / "q")
    loaded = load_model(tmp_path / "q", packed=packed)
    assert {layer.packed_dtype for layer in layers_of(loaded).values()} == {None}


def test_float32_cannot_be_packed(tmp_path):
    save_quantised(toy_model("llama"), tmp_path / "q")
    with pytest.raises(ValueError, match=r"packed is True and dtype torch.float32, need one of"):
        load_model(tmp_path / "q", packed=True)


# --- the decision on CUDA, with a driver that is not needed: kernels are loaded, or say why not


class Loads:
    """Stands for nvfp4r.jit.load_module; records its calls."""

    def __init__(self, error=None):
        self.indices, self.error = [], error

    def __call__(self, index):
        self.indices.append(index)
        if self.error is not None:
            raise self.error


@pytest.fixture
def loads(monkeypatch, request):
    fake = Loads(getattr(request, "param", None))
    monkeypatch.setattr("nvfp4r.hf.load.load_module", fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    return fake


@pytest.mark.parametrize(("device", "index"), [("cuda", 2), ("cuda:0", 0), ("cuda:1", 1)])
@pytest.mark.parametrize("packed", [None, True])
@both_dtypes
def test_on_cuda_kernels_are_loaded_first(loads, packed, dtype, device, index):
    assert _packing_dtype(packed, torch.device(device), dtype) is dtype
    assert loads.indices == [index]


@pytest.mark.parametrize(
    ("packed", "device", "dtype", "packs"),
    [
        (None, "cuda", torch.float32, False),
        (None, "cpu", torch.bfloat16, False),
        (False, "cuda", torch.bfloat16, False),
        (False, "cuda", torch.float32, False),
        (True, "cpu", torch.bfloat16, True),
        (True, "cpu", torch.float16, True),
    ],
)
def test_no_kernels_are_loaded_where_none_are_used(loads, packed, device, dtype, packs):
    expected = dtype if packs else None
    assert _packing_dtype(packed, torch.device(device), dtype) is expected
    assert loads.indices == []


MISSING = ImportError("NVRTC, which is missing; run: pip install 'reset-decoding[gpu]'")
TOO_OLD = UnsupportedGPUError("this GPU has compute capability 7.5; the kernels need 8.0")


@pytest.mark.parametrize("loads", [MISSING, TOO_OLD], ids=["missing", "too_old"], indirect=True)
def test_without_kernels_one_warning_says_why(loads, caplog):
    assert _packing_dtype(None, torch.device("cuda:1"), torch.bfloat16) is None
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("nvfp4r.hf.load", logging.WARNING)
    assert record.getMessage() == (
        f"weights are dequantised on cuda:1, as the NVFP4 kernels do not run there: {loads.error}"
    )


@pytest.mark.parametrize("loads", [MISSING, TOO_OLD], ids=["missing", "too_old"], indirect=True)
def test_without_kernels_packing_on_demand_is_an_error(loads, caplog):
    with pytest.raises(type(loads.error), match=str(loads.error)[:20]):
        _packing_dtype(True, torch.device("cuda:1"), torch.bfloat16)
    assert caplog.records == []
