"""load_model on a GPU: packed by default, right layer by layer, small, and ready for a capture.

Logits and layers are held to the bounds of packed_truth.py, with additions that truncate, as those
of a tensor core may.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nvfp4r.calibration import calibrate
from nvfp4r.format import NVFP4Tensor
from nvfp4r.hf import load_model
from nvfp4r.linear import NVFP4Linear
from nvfp4r.quantize import global_scale_from_amax, quantize
from tests.nvfp4r.packed_truth import (
    TRUNCATED,
    assert_linear,
    assert_logits,
    assert_separated,
    checked_layers,
    separated_model,
)
from tests.nvfp4r.toy_models import (
    config_of,
    dequantised,
    linear_names,
    save_quantised,
    token_ids,
    toy_model,
)

pytestmark = pytest.mark.gpu
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
both_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
MB = 1 << 20


def logits(model, ids):
    with torch.inference_mode():
        return model(input_ids=ids.to(model.device)).logits


@both_dtypes
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_every_layer_and_the_logits_of_a_model(tmp_path, kind, dtype):
    """1 token and 14 (2 x 7) by the kernel, 22 (2 x 11) by what serves larger M."""
    model = toy_model(kind, dtype=dtype)
    tensors = save_quantised(model, tmp_path / "q")
    plain = dequantised(model, tensors, torch.float32)
    loaded = load_model(tmp_path / "q", device="cuda", packed=None)
    for ids in (token_ids(1, 1), token_ids(2, 7), token_ids(2, 11)):
        with checked_layers(loaded, tensors, addition=TRUNCATED) as calls:
            got = logits(loaded, ids)
        assert calls == dict.fromkeys(linear_names(model), 1)
        assert got.dtype == dtype
        assert_logits(got, logits(plain, ids))


@both_dtypes
def test_every_layer_of_a_w4a4_model(tmp_path, dtype):
    model = toy_model("qwen2")
    names = linear_names(model)
    amax = calibrate(model, [token_ids(2, 24)], names)
    scales = {name: global_scale_from_amax(amax[name], name) for name in names}
    clipped = "model.layers.1.mlp.down_proj"
    scales[clipped] = scales[clipped] / 4096
    tensors = save_quantised(model, tmp_path / "q", input_scales=scales)
    loaded = load_model(tmp_path / "q", device="cuda", dtype=dtype, packed=None)
    for ids in (token_ids(1, 1), token_ids(2, 7), token_ids(2, 11)):
        with checked_layers(loaded, tensors, addition=TRUNCATED) as calls:
            logits(loaded, ids)
        assert calls == dict.fromkeys(names, 1)
    # 6 blocks of each of the 37 tokens exceed a range that is 4096 times too small.
    assert int(loaded.get_submodule(clipped).saturated_blocks) == 37 * 96 // 16


@both_dtypes
def test_greedy_generation_is_that_of_the_dequantised_model(tmp_path, dtype):
    """Where the float32 model's logits are further apart than either model's can be off."""
    model = separated_model("llama", dtype)
    tensors = save_quantised(model, tmp_path / "q")
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    plain = dequantised(model, tensors, torch.float32)
    expected = plain.generate(token_ids(2, 7), **options)
    assert_separated(logits(plain, expected), dtype)
    ids = token_ids(2, 7).cuda()
    packed = load_model(tmp_path / "q", device="cuda", packed=None)
    unpacked = load_model(tmp_path / "q", device="cuda", packed=False)
    for loaded, packed_dtype in ((packed, dtype), (unpacked, None), (packed, dtype)):
        layers = [m for m in loaded.modules() if isinstance(m, NVFP4Linear)]
        assert {layer.packed_dtype for layer in layers} == {packed_dtype}
        assert torch.equal(loaded.generate(ids, **options).cpu(), expected)


def test_float32_models_are_not_packed(tmp_path):
    save_quantised(toy_model("llama"), tmp_path / "q")
    loaded = load_model(tmp_path / "q", device="cuda", packed=None)
    layers = [m for m in loaded.modules() if isinstance(m, NVFP4Linear)]
    assert {layer.packed_dtype for layer in layers} == {None}


def test_nothing_is_compiled_or_loaded_inside_a_capture(tmp_path):
    """In a process of its own: the first thing that it launches is captured."""
    save_quantised(toy_model("llama", dtype=torch.bfloat16), tmp_path / "q")
    script = """
        import sys
        import torch
        from nvfp4r.hf import load_model
        layer = load_model(sys.argv[1], device="cuda", packed=None).model.layers[0].mlp.down_proj
        x = torch.ones(1, layer.in_features, dtype=torch.bfloat16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
        torch.cuda.synchronize()
        print(torch.equal(y, layer(x)), bool(y.any()))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "q")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True True"), done.stderr


@both_dtypes
def test_a12_a_captured_graph_sees_the_second_load(dtype):
    torch.manual_seed(0)
    first, second = quantize(torch.randn(40, 144)), quantize(3 * torch.randn(40, 144))
    layer = NVFP4Linear(first.to("cuda"), torch.randn(40, device="cuda"))
    layer.pack_(dtype)
    x = torch.randn(3, 144, device="cuda").to(dtype)
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    graph.replay()
    assert_linear(y, x, first, layer.bias, addition=TRUNCATED)
    bias = torch.randn(40)
    layer.load_(second, bias)  # from the CPU
    graph.replay()
    assert_linear(y, x, second, bias, addition=TRUNCATED)


def linear_heavy(folder):
    """A checkpoint of 96 Mi weights in 42 matrices, 4 Mi at most, and 256 Ki other parameters."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    quantised = {f"{name}.weight" for name in linear_names(model)}
    tensors = {}
    for name, slot in model.state_dict().items():
        if name not in quantised:
            tensors[name] = torch.ones(slot.shape, dtype=slot.dtype)
            continue
        N, K = slot.shape
        scale_bytes = torch.randint(1, 127, (N, K // 16), dtype=torch.uint8)
        tensors[name] = NVFP4Tensor(
            torch.randint(0, 256, (N, K // 2), dtype=torch.uint8),
            scale_bytes.view(torch.float8_e4m3fn),
            torch.tensor(1e-4),
        )
    save_quantised(model, folder, tensors=tensors, config=config_of(model))
    return sum(model.state_dict()[name].numel() for name in quantised)


def test_a_packed_model_is_small_and_so_is_loading_it(tmp_path):
    """0.5625 bytes per weight and a little, nothing kept besides, one matrix unpacked at a time.

    Packing takes the unpacked matrix, 2.25 MiB here, and, for the 2 Mi weights that it works on at
    a time, a few temporaries of 2 bytes per weight: 32 MiB are ample. Keeping all matrices until
    the end would take 54 MiB more than the model.
    """
    weights = linear_heavy(tmp_path / "q")
    load_model(
        tmp_path / "q", device="cuda", packed=None
    )  # whatever a first use allocates for good
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = load_model(tmp_path / "q", device="cuda", packed=None)
    gc.collect()
    held = torch.cuda.memory_allocated() - before
    assert weights == 96 * MB
    assert held < 0.6 * weights  # 0.5625 in tiles, 0.005 in 16-bit parameters, alpha and norms
    assert torch.cuda.max_memory_allocated() - before - held < 32 * MB
    with torch.inference_mode():
        model.model.layers[0].mlp(torch.ones(1, 1, 1024, dtype=torch.bfloat16, device="cuda"))
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 0.6 * weights
