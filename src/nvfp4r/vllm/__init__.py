"""This project's NVFP4 linear layers inside vLLM: `nvfp4r.enable()` or NVFP4R=1, nothing patched.

`register` is what vLLM calls in each of its processes (entry point of vllm.general_plugins). It
does nothing unless the plug-in is switched on. docs/vllm-nvfp4.md tells how to see what is used.

Nothing here imports vLLM before it is needed; kernel.py, methods.py and configs.py import it.
"""

from __future__ import annotations

import os
import sys
from types import EllipsisType

from nvfp4r.vllm.settings import ActivationSetting, Settings, change
from nvfp4r.vllm.status import Status, status
from nvfp4r.vllm.versions import (
    check_plugin_is_loaded,
    check_version,
    installed_version,
    warn_of_old_variable,
)

__all__ = ["Settings", "Status", "configure", "disable", "enable", "register", "status"]


def register() -> None:
    """Puts this project's layers where vLLM looks for them, if the plug-in is switched on.

    May be called any number of times.

    Raises:
        ValueError: an environment variable of the plug-in holds something else than it may.
        UnknownVllmError: switched on, but the installed vLLM is none of the known releases.
        RuntimeError: another plug-in has taken the same place.
    """
    if not Settings.from_environment().enabled:
        return
    _require_vllm()
    warn_of_old_variable(os.environ)
    from nvfp4r.vllm.configs import install

    install()


def enable() -> None:
    """Models that vLLM builds from now on, here and in its workers, use this project's layers.

    Call it before the engine is made; NVFP4R=1 in the environment does the same.

    Raises:
        ImportError: vLLM is not installed.
        UnknownVllmError: the installed vLLM is none of the known releases.
        RuntimeError: vLLM would not load the plug-in, or another one has taken the same place.
        ValueError: an environment variable of the plug-in holds something else than it may.
    """
    _require_vllm()
    check_plugin_is_loaded(os.environ)
    before = Settings.from_environment()
    change(enabled=True)
    if "vllm" not in sys.modules:
        return  # vLLM calls `register` when it makes an engine
    try:
        register()  # it may have called it already, when there was nothing to do
    except RuntimeError:
        change(enabled=before.enabled)
        raise


def disable() -> None:
    """Models that vLLM builds from now on use vLLM's own layers; models that are built stay.

    Raises:
        ValueError: an environment variable of the plug-in holds something else than it may.
    """
    change(enabled=False)


def configure(
    *,
    gemv_max_m: int | EllipsisType | None = ...,
    activations: ActivationSetting | EllipsisType = ...,
) -> Settings:
    """Sets what models that are built from now on are told; what is left out stays as it is.

    Args:
        gemv_max_m: largest number of tokens that the kernels serve, >= 0; above it weights are
            unpacked for a dense product. None sets no limit: the plan decides.
        activations: for W4A4 checkpoints, "nvfp4", "none", or "auto": 4 bits where the GPU has FP4
            units.

    Returns:
        All settings as they are now.

    Raises:
        TypeError, ValueError: a value is out of range; names it, and nothing is changed.

    Example:
        >>> configure(gemv_max_m=8).gemv_max_m                    # doctest: +SKIP
        8
    """
    given = {"gemv_max_m": gemv_max_m, "activations": activations}
    return change(**{name: value for name, value in given.items() if value is not ...})


def _require_vllm() -> None:
    version = installed_version()
    if version is None:
        raise ImportError(
            "nvfp4r inside vLLM needs vLLM, which is not installed; "
            "pip install 'reset-decoding[vllm]'"
        )
    check_version(version)
