"""CUDA source text to machine code for one target, with NVRTC; no GPU and no driver needed.

Knows nothing of files: sources come as text, headers included by name. Reads from the compiler's
own report what each kernel uses, so that spills are found wherever the code is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvfp4r.jit.arch import Target

# No fast math anywhere: exact products in fp16 need subnormals, and division must be rounded right.
# --no-source-include keeps files of the current folder out, which no cache key could know of.
# -lineinfo changes no instruction; profilers, sanitizers and our errors name source lines with it.
# Nor does --split-compile, which assembles kernels in parallel. --no-cache: what comes from the
# compiler's own cache has no report of registers and spills; the cache of this package is cache.py.
_OPTIONS = (
    "-std=c++17",
    "--no-source-include",
    "-lineinfo",
    "--split-compile=0",
    "--no-cache",
    "--ptxas-options=-v",
)
_ERROR = re.compile(
    r"(.+\(\d+\): )?(catastrophic |internal |Command-line |nvrtc: )?error\b"  # the compiler's
    r"|ptxas\b[^:]*\b(error|fatal)\b *:"  # the assembler's
)
_OLDEST_NVRTC = (12, 9)  # the first that knows every target and option used here
_INSTALL = (
    "run: pip install 'reset-decoding[gpu]' (cuda-bindings >= 12.9, < 14, and the "
    "nvidia-cuda-nvrtc of the same major version)"
)
_FAST_MATH = re.compile(r"--?(use_fast_math|ftz=true|prec-div=false|prec-sqrt=false)")


class CompileError(RuntimeError):
    """NVRTC refused the sources.

    Attributes:
        log: all that it said.
        command: what it was asked, as a command line.
    """

    def __init__(self, message: str, *, log: str, command: str) -> None:
        super().__init__(message)
        self.log = log
        self.command = command


@dataclass(frozen=True)
class Cubin:
    """Machine code for one target.

    Attributes:
        data: the ELF image.
        log: what the compiler said, resources of every kernel included.
        command: what it was asked, as a command line.
    """

    data: bytes
    log: str
    command: str


@dataclass(frozen=True)
class Resources:
    """What one kernel uses.

    Attributes:
        registers: per thread.
        stack_bytes: per thread; local memory for spills and for arrays that are indexed at run
            time.
        spill_bytes: stores and loads of spilled registers, in bytes, as they stand in the code.
        static_shared_bytes: per block, besides what the launch asks for.
    """

    registers: int
    stack_bytes: int
    spill_bytes: int
    static_shared_bytes: int


def compile_options(target: Target, options: Sequence[str] = ()) -> tuple[str, ...]:
    """All options that the sources are compiled with for `target`.

    Raises:
        ValueError: an option switches fast math on.
    """
    for option in options:
        if _FAST_MATH.match(option):
            raise ValueError(f"options: got {option}, which changes results; leave it out")
    return (f"--gpu-architecture={target.sm}", *_OPTIONS, *target.defines, *options)


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC that compiles here.

    Raises:
        ImportError: NVRTC or its Python bindings are missing, or too old.
    """
    return _nvrtc()[1]


def compile_cubin(
    target: Target, sources: Mapping[str, str], entry: str, options: Sequence[str] = ()
) -> Cubin:
    """Compiles one translation unit.

    Args:
        target: what to compile for.
        sources: file name -> text; `#include "name"` finds them by that name, and nothing else.
        entry: the name of the source to compile.
        options: further NVRTC options, after those of `compile_options`.

    Raises:
        CompileError: the sources do not compile, or this NVRTC does not know the target or option.
        ImportError: NVRTC or its Python bindings are missing, or too old.
        ValueError: `entry` is not among the sources; fast math was asked for.
    """
    if entry not in sources:
        raise ValueError(f"entry: got {entry!r}, need one of the sources: {', '.join(sources)}")
    flags = compile_options(target, options)
    nvrtc, version = _nvrtc()
    command = f"nvrtc-{_dotted(version)} {' '.join(flags)} {entry}"

    headers = [name for name in sources if name != entry]
    program = _check(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            sources[entry].encode(),
            entry.encode(),
            len(headers),
            [sources[name].encode() for name in headers],
            [name.encode() for name in headers],
        ),
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
        log = _text(nvrtc, program, "ProgramLog")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            ptx = _text(nvrtc, program, "PTX")
            where = f"NVRTC {_dotted(version)} could not compile {entry} for {target.sm}"
            told = _first_error(log, sources, ptx) or _error_text(nvrtc, status)
            message = f"{where}: {told}\n  options: {' '.join(flags)}"
            raise CompileError(message, log=log, command=command)
        return Cubin(_bytes(nvrtc, program, "CUBIN"), log, command)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def resources(cubin: Cubin) -> dict[str, Resources]:
    """Kernel name -> what it uses, as the assembler reports it.

    Raises:
        ValueError: the compiler log holds no report, or one that this function cannot read.
    """
    found = {}
    for name, report in re.findall(
        r"Compiling entry function '([^']+)'(.*?)(?=Compiling entry function|\Z)", cubin.log, re.S
    ):
        stack = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
        )
        registers = re.search(r"Used (\d+) registers", report)
        if stack is None or registers is None:
            raise ValueError(f"compiler log: cannot read what kernel {name} uses:{report}")
        shared = re.search(r"(\d+) bytes smem", report)
        found[name] = Resources(
            registers=int(registers[1]),
            stack_bytes=int(stack[1]),
            spill_bytes=int(stack[2]) + int(stack[3]),
            static_shared_bytes=int(shared[1]) if shared else 0,
        )
    if not found:
        raise ValueError("compiler log: it reports no kernel; need one compiled by compile_cubin")
    return found


def _nvrtc() -> tuple[Any, tuple[int, int]]:
    """The bindings and the version of the library that they found."""
    try:
        from cuda.bindings import nvrtc

        # The library is loaded by the first call; that it is missing is a RuntimeError.
        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"the CUDA kernels are compiled here with NVRTC, which is missing ({error}); {_INSTALL}"
        ) from error
    _check(nvrtc, (status,))
    version = (major, minor)
    if version < _OLDEST_NVRTC:
        raise ImportError(
            f"NVRTC: got version {_dotted(version)}, need {_dotted(_OLDEST_NVRTC)} or newer to "
            f"compile the CUDA kernels; {_INSTALL}"
        )
    return nvrtc, version


def _first_error(log: str, sources: Mapping[str, str], ptx: str) -> str | None:
    """The first error line of a log, and the line of source that it speaks of."""
    for line in log.splitlines():
        if not _ERROR.match(line):
            continue
        place = re.match(r"(?P<file>[^()]+)\((?P<line>\d+)\): ", line)
        if place and place["file"] in sources:
            return f"{line}\n  line:    {_line(sources[place['file']], int(place['line']))}"
        place = re.match(r"ptxas .*, line (?P<line>\d+);", line)
        if place:
            number = int(place["line"])
            told = f"{line}\n  PTX:     {_line(ptx, number)}"
            origin = _origin(ptx, number)
            if origin and origin[0] in sources:
                source = _line(sources[origin[0]], origin[1])
                told += f"\n  line:    {origin[0]}({origin[1]}): {source}"
            return told
        return line
    return None


def _origin(ptx: str, number: int) -> tuple[str, int] | None:
    """Source file and line that a line of PTX comes from, by the `.loc` before it."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', ptx, re.M))
    above = "\n".join(ptx.splitlines()[:number])
    places = re.findall(r"^\s*\.loc\s+(\d+)\s+(\d+)", above, re.M)
    if not places:
        return None
    file, line = places[-1]
    return files.get(file, "").rpartition("/")[2], int(line)


def _line(text: str, number: int) -> str:
    lines = text.splitlines()
    return lines[number - 1].strip() if 0 < number <= len(lines) else "(not there)"


def _text(nvrtc: Any, program: Any, what: str) -> str:
    # Each stage of the compiler ends its part of the log with a zero byte.
    return _bytes(nvrtc, program, what).replace(b"\0", b"").decode(errors="replace").strip()


def _bytes(nvrtc: Any, program: Any, what: str) -> bytes:
    """One of NVRTC's results: its size is asked, then a buffer of that size is filled."""
    buffer = bytearray(_check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program)))
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return bytes(buffer)


def _check(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    """What an NVRTC call returned, without its status."""
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC failed: {_error_text(nvrtc, status)}")
    return values[0] if values else None


def _error_text(nvrtc: Any, status: Any) -> str:
    return nvrtc.nvrtcGetErrorString(status)[1].decode()


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
