"""Where a model's files are: in a folder here, or on the Hugging Face hub.

Finds and fetches files; knows nothing of what is in them.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

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
        OSError: the hub cannot be reached, or answers with an error.
    """
    path = Path(model)
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"model {model}: is a file, need the folder that holds config.json")
    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except HFValidationError as error:
        raise ValueError(
            f"model {model}: no such folder, and no name that a hub model can have (OWNER/NAME)"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"model {model}: no such folder, and no such model on the hub, or one that needs "
            "a login (hf auth login)"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise OSError(
            f"model {model}: no such folder, and the hub cannot be reached to fetch a model of "
            "this name; check the path and the network, or copy the model's files here and give "
            "their folder"
        ) from error
    except HfHubHTTPError as error:
        raise OSError(
            f"model {model}: the hub answered with an error ({error}); try again later, or copy "
            "the model's files here and give their folder"
        ) from error
