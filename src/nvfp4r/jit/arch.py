"""Which GPU gets which build of the kernels, and what that build may use.

Plain data, by families of compute capability: a new member of a known family is served by the rule
of its family, never by a list of equal numbers. Knows nothing of torch, compilers or drivers.

Sources: the CUDA programming guide (compute capabilities; binary compatibility within a major
number, which does not reach from desktop to embedded GPUs), the PTX manual (family targets `f`,
architecture targets `a`), and the compiler itself: a test compiles every feature below for every
target and expects it to be refused exactly where this table says no.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

TARGETS = ("80", "86", "89", "90a", "100a", "103a", "120a", "121a")
FURTHER_TARGETS = ("87", "100f", "120f")  # embedded Ampere; GPUs newer than this table


class UnsupportedGPUError(RuntimeError):
    """The kernels are not built for this GPU; the message says what is built and what to do."""


@dataclass(frozen=True)
class Target:
    """One architecture that the kernels are compiled for.

    Attributes:
        name: as in `--gpu-architecture=sm_<name>`.
        shared_bytes_per_block: static and dynamic shared memory that a block may ask for.
        shared_bytes_per_sm: what resident blocks share; each block costs 1024 bytes more than it
            asks for.
        has_fp4_convert: E2M1 pairs to and from wider floats in one instruction.
        has_e4m3_convert: E4M3 pairs to and from wider floats in one instruction.
        has_bulk_copy: cp.async.bulk and mbarrier transactions.
        has_cluster: thread block clusters and distributed shared memory.
        has_pdl: programmatic dependent launch (griddepcontrol).
        has_256_bit_loads: 32-byte global loads, with an L2 eviction hint.
        has_wgmma: matrix instructions of a warpgroup, which only 9.0 has.
    """

    name: str
    shared_bytes_per_block: int
    shared_bytes_per_sm: int
    has_fp4_convert: bool
    has_e4m3_convert: bool
    has_bulk_copy: bool
    has_cluster: bool
    has_pdl: bool
    has_256_bit_loads: bool
    has_wgmma: bool

    @property
    def sm(self) -> str:
        return f"sm_{self.name}"

    @property
    def defines(self) -> tuple[str, ...]:
        """Every `has_` attribute as a macro of the sources, NVFP4R_HAS_PDL and so on: 0 or 1."""
        return tuple(
            f"-DNVFP4R_{field.name.upper()}={int(getattr(self, field.name))}"
            for field in fields(self)
            if field.name.startswith("has_")
        )


@dataclass(frozen=True)
class _Family:
    """Compute capabilities major.first .. major.last, which one target serves."""

    major: int
    first: int
    last: int
    target: Target


def _family(major: int, first: int, last: int, name: str, *, shared_kib_per_sm: int) -> _Family:
    number = 10 * major + first
    target = Target(
        name=name,
        shared_bytes_per_block=(shared_kib_per_sm - 1) * 1024,
        shared_bytes_per_sm=shared_kib_per_sm * 1024,
        has_fp4_convert=number >= 100,
        has_e4m3_convert=number >= 89,
        has_bulk_copy=number >= 90,
        has_cluster=number >= 90,
        has_pdl=number >= 90,
        has_256_bit_loads=number >= 100,
        has_wgmma=number == 90,
    )
    return _Family(major, first, last, target)


_ANY = 99
_FAMILIES = (
    # Code for 8.x runs on later 8.y, but not between desktop and embedded GPUs (8.7).
    _family(8, 0, 5, "80", shared_kib_per_sm=164),
    _family(8, 6, 6, "86", shared_kib_per_sm=100),
    _family(8, 7, 7, "87", shared_kib_per_sm=164),
    _family(8, 9, _ANY, "89", shared_kib_per_sm=100),
    # Code with the suffix a runs on that very capability, code with f on later ones of the family.
    # FP4 conversions need one of the two.
    _family(9, 0, 0, "90a", shared_kib_per_sm=228),
    _family(10, 0, 0, "100a", shared_kib_per_sm=228),
    _family(10, 3, 3, "103a", shared_kib_per_sm=228),
    _family(10, 4, _ANY, "100f", shared_kib_per_sm=228),
    # 10.1 (to older drivers) and 11.0 (to newer ones) are one embedded GPU: not built.
    _family(12, 0, 0, "120a", shared_kib_per_sm=100),
    _family(12, 1, 1, "121a", shared_kib_per_sm=100),
    _family(12, 2, _ANY, "120f", shared_kib_per_sm=100),
)


def targets() -> Iterator[Target]:
    """All targets, those of `TARGETS` and `FURTHER_TARGETS`."""
    return (family.target for family in _FAMILIES)


def target_named(name: str) -> Target:
    """The target that is compiled with `--gpu-architecture=sm_<name>`.

    Raises:
        ValueError: there is none of this name.
    """
    for target in targets():
        if target.name == name:
            return target
    known = ", ".join(target.name for target in targets())
    raise ValueError(f"target: got {name!r}, need one of {known}")


def target_for(capability: tuple[int, int]) -> Target:
    """The target whose code runs on a GPU.

    Args:
        capability: (major, minor), as `torch.cuda.get_device_capability` returns it.

    Raises:
        UnsupportedGPUError: the kernels are not built for this GPU.
    """
    major, minor = capability
    for family in _FAMILIES:
        if family.major == major and family.first <= minor <= family.last:
            return family.target
    if major < 8:
        reason = "they need asynchronous copies and matrix instructions that came with 8.0"
    else:
        reason = "no code built for those runs on it"
    raise UnsupportedGPUError(
        f"this GPU has compute capability {major}.{minor}; the kernels of nvfp4r are built for "
        f"{_built()}: {reason}. NVFP4 layers fall back to dequantised weights there; a newer "
        "release may know it."
    )


def _built() -> str:
    ranges = []
    for family in _FAMILIES:
        text = f"{family.major}.{family.first}"
        if family.last == _ANY:
            text += " and later"
        elif family.last != family.first:
            text += f"-{family.major}.{family.last}"
        ranges.append(text)
    return ", ".join(ranges)
