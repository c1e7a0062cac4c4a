"""Which engine decodes, as flags: shared by the commands that score answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from reset.cli import options
from reset.evaluate.engines import Engine
from reset.evaluate.prompts import PromptForm

EngineName = Annotated[
    str, typer.Option(help="hf, vllm, or the address of a server (http://host:8000/v1).")
]
Backend = Annotated[
    Literal["auto", "nvfp4r"],
    typer.Option(help="NVFP4 linear layers: the engine's choice, or this project's kernels."),
]
Device = Annotated[
    str | None, typer.Option(help="Torch device; cpu if left out, with vllm its own.")
]
TensorParallel = Annotated[int, typer.Option(help="GPUs that share the model; vllm only.")]
Concurrency = Annotated[int, typer.Option(help="Answers decoded at once; vllm and servers.")]
Timeout = Annotated[float, typer.Option(help="Seconds for one answer of a server.")]
Retries = Annotated[int, typer.Option(help="Further tries when a server fails.")]
Thinking = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking", help="Switch of the chat template; its own if left out."
    ),
]
Prompt = Annotated[
    PromptForm,
    typer.Option(help="task: says how to write the answer; plain: the question alone."),
]


@dataclass(frozen=True)
class Choice:
    """The flags of an engine, by name.

    Raises:
        ValueError: no such engine or device, or a flag that the engine would ignore.
    """

    name: str
    model: str
    backend: Literal["auto", "nvfp4r"] = "auto"
    device: str | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    activations: Literal["checkpoint", "none", "nvfp4"] = "checkpoint"
    tp: int = 1
    concurrency: int = 8
    timeout_s: float = 3600.0
    retries: int = 5
    thinking: bool | None = None

    def __post_init__(self) -> None:
        if self.name not in ("hf", "vllm") and not self.is_server:
            raise ValueError(
                f"--engine is {self.name!r}; need hf, vllm, or an address such as "
                "http://localhost:8000/v1"
            )
        if self.tp < 1 or (self.tp > 1 and self.name != "vllm"):
            raise ValueError(
                f"--tp is {self.tp}; it must be at least 1, and 1 unless --engine is vllm"
            )
        if self.is_server and (self.backend != "auto" or self.device is not None):
            raise ValueError(
                "a server chooses its own kernels and device; drop --backend and --device"
            )
        if self.activations != "checkpoint" and self.name != "hf":
            raise ValueError("--activations is for --engine hf; the others follow the checkpoint")
        if self.device is not None or self.name == "hf":
            options.checked_device(self.device or "cpu")

    @property
    def is_server(self) -> bool:
        return self.name.startswith(("http://", "https://"))


def open_engine(choice: Choice) -> Engine:
    """The engine; a model that runs here is loaded.

    Raises:
        ValueError, OSError, ImportError: as the engine.
    """
    if choice.is_server:
        from reset.evaluate.engines.endpoint import HttpEngine

        return HttpEngine(
            choice.name,
            choice.model,
            concurrency=choice.concurrency,
            timeout_s=choice.timeout_s,
            retries=choice.retries,
            thinking=choice.thinking,
        )
    if choice.name == "vllm":
        from reset.evaluate.engines.vllm import VllmEngine

        return VllmEngine(
            choice.model,
            device=choice.device,
            dtype=choice.dtype,
            tensor_parallel=choice.tp,
            use_nvfp4r=choice.backend == "nvfp4r",
            thinking=choice.thinking,
            max_running=choice.concurrency,
        )
    from reset.evaluate.engines.hf import TransformersEngine

    return TransformersEngine(
        choice.model,
        device=choice.device or "cpu",
        dtype=choice.dtype,
        activations=choice.activations,
        thinking=choice.thinking,
        needs_nvfp4=choice.backend == "nvfp4r",
    )
