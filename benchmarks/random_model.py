"""Models of Qwen3's shapes with random weights, for vLLM, without a download; and their sizes.

A model loader (vLLM's register_model_loader, format "random") fills the parameters: codes uniform,
block scales uniform over E4M3's bytes for 1.0 to 3.75, global and input scales 2^-8, norms 1, the
rest normal with deviation 0.02. vLLM's load_format="dummy" would leave block scales that are zero
or negative, which NVFP4 does not have.

Engines that share a GPU must say what they need: vLLM's own way, to measure what is free and take
it, fails or takes too much beside neighbours. `memory_options` gives the KV cache in bytes, with
which vLLM skips that measurement, and `engine_bytes` estimates the whole.
"""

from __future__ import annotations

import time
from typing import Any

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_LARGE = {"hidden_size": 5120, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
SHAPES: dict[str, dict[str, int]] = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "qwen3-14b": {
        **_LARGE,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "qwen3-32b": {
        **_LARGE,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "tiny": {
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 49152,
    },
}
_NVFP4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
NVFP4 = {
    "config_groups": {
        "group_0": {"input_activations": _NVFP4, "weights": _NVFP4, "targets": ["Linear"]}
    },
    "ignore": ["lm_head"],
    "quant_algo": "NVFP4",
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quant_method": "modelopt",
}
SCALE = 2.0**-8
ONE, ABOVE = 0x38, 0x48  # bytes of E4M3: 1.0, and the one after 3.75
BF16, FP4 = 2.0, 9 / 16  # bytes of a weight; a scale byte for sixteen codes
PAGE = 256  # tokens; a multiple of every page size of vLLM's KV cache
BESIDES = 2.5 * 2**30  # bytes: CUDA context, the attention's workspace, libraries, CUDA graphs


def config(shape: str, *, nvfp4: bool, quantised_head: bool = False) -> dict[str, Any]:
    """The model's config.json."""
    model: dict[str, Any] = {**QWEN3, **SHAPES[shape]}
    if nvfp4:
        model["quantization_config"] = {**NVFP4, "ignore": [] if quantised_head else ["lm_head"]}
    return model


def weight_bytes(shape: str, *, nvfp4: bool, quantised_head: bool = False) -> int:
    """Linear layers, embedding and lm_head; norms are too small to count."""
    of = SHAPES[shape]
    hidden, heads, kv_heads = (
        of[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    attention = hidden * of["head_dim"] * (2 * heads + 2 * kv_heads)
    linear = of["num_hidden_layers"] * (attention + 3 * hidden * of["intermediate_size"])
    table = of["vocab_size"] * hidden
    head = FP4 if nvfp4 and quantised_head else BF16
    return int(linear * (FP4 if nvfp4 else BF16) + table * (BF16 + head))


def kv_bytes(shape: str, requests: int, tokens: int) -> int:
    """bf16 keys and values of `requests` of `tokens` each, whole pages, and 20 % more."""
    of = SHAPES[shape]
    token = 2 * BF16 * of["num_hidden_layers"] * of["num_key_value_heads"] * of["head_dim"]
    pages = requests * -(-tokens // PAGE) + 1  # vLLM keeps one back
    return int(1.2 * token * pages * PAGE)


def engine_bytes(shape: str, kv: int, step_tokens: int, **kind: bool) -> int:
    """What an engine is about to take: weights, KV cache, a step of `step_tokens`, the rest."""
    of = SHAPES[shape]
    widest = 3 * of["intermediate_size"] + 4 * of["hidden_size"]
    unpacked = 2 * of["intermediate_size"] * of["hidden_size"] if kind.get("nvfp4") else 0
    activations = BF16 * (step_tokens * widest + unpacked)
    return int(weight_bytes(shape, **kind) + kv + activations + BESIDES)


def memory_options(kv: int) -> dict[str, Any]:
    """For vllm.LLM, beside other engines.

    With kv_cache_memory_bytes vLLM (0.26 to 0.33) measures nothing and uses
    gpu_memory_utilization only to refuse to start where that share of the GPU is not free.
    """
    return {"kv_cache_memory_bytes": kv, "gpu_memory_utilization": 0.02}


def register_loader(load: dict[str, float]) -> None:
    """The load format "random"; writes times and memory of loading into `load`."""
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    has_gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if has_gpu else lambda: None

    @register_model_loader("random")
    class RandomLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            start = time.perf_counter()
            torch.manual_seed(0)
            for name, parameter in model.named_parameters():
                fill(name, parameter.data)
            wait()
            load["fill_s"] = time.perf_counter() - start

        def load_model(self, *positional: Any, **named: Any) -> torch.nn.Module:
            if has_gpu:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            model: torch.nn.Module = super().load_model(*positional, **named)
            wait()
            load["load_s"] = time.perf_counter() - start - load["fill_s"]
            if has_gpu:
                load["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
                load["weights_gb"] = torch.cuda.memory_allocated() / 1e9
            return model

    def fill(name: str, data: torch.Tensor) -> None:
        if data.dtype == torch.uint8:
            data.random_(0, 256)
        elif data.dtype == torch.float8_e4m3fn:
            data.view(torch.uint8).random_(ONE, ABOVE)
        elif name.endswith(("weight_scale_2", "input_scale")):
            data.fill_(SCALE)
        elif data.ndim == 1:
            data.fill_(1.0)
        else:
            data.normal_(std=0.02)
