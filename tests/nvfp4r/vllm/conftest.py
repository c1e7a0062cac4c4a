"""vLLM in the process of the tests, without an engine."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """vLLM's layers and parameters ask for the rank of this process; for tests marked `vllm`."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield
    cleanup_dist_env_and_memory()
