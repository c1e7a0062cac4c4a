"""The model that is to be quantised: what its layers are, its tokenizer, itself.

Needs transformers; files and plans are nvfp4r's business (selection.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)

from nvfp4r.selection import ConversionPlan


def check_linear_layers(plan: ConversionPlan) -> str | None:
    """Refuses a plan that takes something else for a linear layer, such as GPT-2's transposed ones.

    Returns:
        Why the check was not possible, or None.

    Raises:
        ValueError: names the layers and their classes.
    """
    model_type = str(plan.config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return (
            f"transformers {transformers.__version__} does not know model_type {model_type!r}, so "
            "whether all these are linear layers was judged by their names and shapes alone"
        )
    config: Any = CONFIG_MAPPING[model_type].from_dict(dict(plan.config))
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return (
            f"model_type {model_type!r} is no causal language model, so whether all these are "
            "linear layers was judged by their names and shapes alone"
        )
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    modules = dict(model.named_modules())
    others = []
    for name in plan.quantised:
        module = modules.get(name) or modules.get(f"{model.base_model_prefix}.{name}")
        if module is not None and not isinstance(module, nn.Linear):
            others.append((name, type(module).__name__))
    if others:
        name, kind = others[0]
        raise ValueError(
            f"{name}: is a {kind} in {type(model).__name__}, need torch.nn.Linear layers "
            f"({len(others)} are of another class); exclude them (--exclude)"
        )
    return None


def load_tokenizer(folder: Path) -> Any:
    """The model's tokenizer, from its own folder.

    Raises:
        ValueError: there is none that transformers can load.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"{folder}: no tokenizer could be loaded, but calibration texts need one; copy the "
            f"model's tokenizer files into it ({' '.join(str(error).split())[:200]})"
        ) from error


def token_rows(texts: Iterable[str], tokenizer: Any, max_tokens: int) -> list[Tensor]:
    """Token ids of every text, [T] int64 each, cut after `max_tokens`; empty ones left out.

    Raises:
        ValueError: `max_tokens` is below 1, or no text gives a token.
    """
    if max_tokens < 1:
        raise ValueError(f"--calib-tokens is {max_tokens}, need at least 1")
    rows = []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=max_tokens)["input_ids"]
        if len(ids):
            rows.append(torch.tensor(ids, dtype=torch.int64))
    if not rows:
        raise ValueError("the calibration texts give no token, need at least one; use longer texts")
    return rows


def load_source_model(folder: Path, device: torch.device) -> PreTrainedModel:
    """The unquantised model in eval mode: in its own dtype, or in float32 on a CPU.

    CPUs run bfloat16 several times slower than float32, which holds the same weights.

    Raises:
        ValueError: weights are missing, which transformers would make up; names them.
    """
    dtype = torch.float32 if device.type == "cpu" else "auto"
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        local_files_only=True,
        device_map={"": device},
        output_loading_info=True,
    )
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} weights that {type(model).__name__} needs are missing, "
            f"{missing[0]} is the first; is config.json the one that belongs to these weights?"
        )
    return model.eval()
