"""The toy model on disk, once per session."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory) -> Path:
    from tests.reset.vllm.engines import save_model

    return save_model(tmp_path_factory.mktemp("toy"))
