"""An extension of vLLM's workers that tells what the plug-in does in them."""

from __future__ import annotations

from typing import Any

from nvfp4r.vllm.status import status


class StatusExtension:
    """For `LLM(..., worker_extension_cls="nvfp4r.vllm.worker.StatusExtension")`."""

    def nvfp4r_status(self) -> dict[str, Any]:
        """`nvfp4r.status()` of a worker, as a dict; `llm.collective_rpc("nvfp4r_status")`."""
        return status().as_dict()
