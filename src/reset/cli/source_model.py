"""The model that is to be quantised: finding it, checking what its layers are, loading it.

Needs transformers; files and plans are nvfp4r's business (selection.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)

from nvfp4r.selection import ConversionPlan

_WANTED = [
    "*.safetensors",
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.tiktoken",
    "*.md",
    "LICENSE*",
]
_UNWANTED = ["original/*", "consolidated*", "onnx/*"]


def model_folder(model: str) -> Path:
    """The folder of a model: `model` itself, or its files fetched from the hub.

    Raises:
        ValueError: neither a folder nor the name of a model on the hub.
        OSError: the hub cannot be reached.
    """
    path = Path(model)
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"--model {model}: is a file, need the folder that holds config.json")
    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except HFValidationError as error:
        raise ValueError(
            f"--model {model}: no such folder, and no name that a hub model can have (OWNER/NAME)"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"--model {model}: no such folder, and no such model on the hub, or one that needs "
            "a login (hf auth login)"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise OSError(
            f"--model {model}: no such folder, and the hub cannot be reached to fetch a model of "
            "this name; check the path and the network, or copy the model's files here and give "
            "their folder"
        ) from error


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


def load_source_model(folder: Path, device: torch.device) -> PreTrainedModel:
    """The unquantised model in eval mode: in its own dtype, or in float32 on a CPU.

    CPUs run bfloat16 several times slower than float32, which holds the same weights.
    """
    dtype = torch.float32 if device.type == "cpu" else "auto"
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, device_map={"": device}
    ).eval()
