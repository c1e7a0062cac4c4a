"""A kernel launched once, for tests."""

from __future__ import annotations

import ctypes
from typing import Any

from nvfp4r.jit import Kernel


def launch(
    kernel: Kernel, argument: bytes | ctypes.Structure, *, stream: int, **configuration: Any
) -> None:
    """Args: as `Kernel.configured` and `Launch` have them."""
    kernel.configured(**configuration)(argument, stream)
