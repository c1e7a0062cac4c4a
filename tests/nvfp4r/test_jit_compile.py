"""NVRTC: every target, what the compiler reports of each kernel, and what its errors say."""

import sys

import pytest

from nvfp4r.jit import (
    FURTHER_TARGETS,
    TARGETS,
    CompileError,
    Cubin,
    Resources,
    compile_cubin,
    kernel_sources,
    resources,
    target_named,
)
from nvfp4r.jit.compile import compile_options, nvrtc_version
from tests.nvfp4r.jit_samples import ENTRY, SOURCES, SPILLING, TABLE, faults

HOPPER = target_named("90a")
EVERYWHERE = {"scale", "tile", "last_word", "step", "stamp"}


def compiled(text, target=HOPPER, options=(), **headers):
    return compile_cubin(target, {"k.cu": text, **headers}, "k.cu", options)


@pytest.mark.parametrize("name", [*TARGETS, *FURTHER_TARGETS])
def test_the_samples_compile_for_every_target(name):
    target = target_named(name)
    cubin = compile_cubin(target, SOURCES, ENTRY)
    expected = set(EVERYWHERE)
    expected |= {"exchange"} if target.has_cluster else set()
    expected |= {"bulk"} if target.has_bulk_copy else set()
    expected |= {"decode"} if target.has_fp4_convert else set()
    expected |= {"group_tile"} if target.has_wgmma else set()
    found = resources(cubin)
    assert set(found) == expected
    assert faults(found, register_ceiling=64) == []
    assert cubin.data.startswith(b"\x7fELF")
    assert f"Compiling entry function 'scale' for 'sm_{name}'" in cubin.log


def test_resources_are_those_of_each_kernel():
    found = resources(compile_cubin(HOPPER, SOURCES, ENTRY))
    assert found["tile"].static_shared_bytes == 32 * 16
    assert found["bulk"].static_shared_bytes >= 512 + 8  # and what alignment costs
    assert found["last_word"].static_shared_bytes == 0  # dynamic memory is the launch's
    assert all(8 <= used.registers <= 64 for used in found.values())


def test_d7_the_check_finds_spills():
    found = resources(compiled(SPILLING))
    assert found["spilling"].spill_bytes > 0
    told = faults(found, register_ceiling=255)
    assert told[0] == f"spilling spills {found['spilling'].spill_bytes} bytes"


def test_d7_the_check_finds_tables_in_local_memory():
    found = resources(compiled(TABLE))
    assert found["table"] == Resources(
        registers=found["table"].registers,
        stack_bytes=16 * 4,
        spill_bytes=0,
        static_shared_bytes=0,
    )
    assert faults(found, register_ceiling=255) == ["table keeps 64 bytes in local memory"]


def test_d7_the_check_finds_too_many_registers():
    found = {"k": Resources(65, 0, 0, 0), "fits": Resources(64, 0, 0, 0)}
    assert faults(found, register_ceiling=64) == ["k uses 65 registers, more than 64"]


def test_options_reach_the_compiler():
    unbounded = SPILLING.replace("__launch_bounds__(1024, 2)", "")
    assert resources(compiled(unbounded))["spilling"].registers > 40
    few = resources(compiled(unbounded, options=("--maxrregcount=32",)))["spilling"]
    assert few.registers <= 32
    assert few.spill_bytes > 0
    assert compile_options(HOPPER)[0] == "--gpu-architecture=sm_90a"
    assert "-DNVFP4R_HAS_PDL=1" in compile_options(HOPPER)
    assert compile_options(HOPPER, ("-DX=1",))[-1] == "-DX=1"


@pytest.mark.parametrize("option", ["--use_fast_math", "-use_fast_math", "--ftz=true"])
def test_fast_math_is_refused(option):
    with pytest.raises(ValueError, match=f"options: got {option}, which changes results"):
        compiled(TABLE, options=(option,))


def test_the_command_is_kept():
    cubin = compiled(TABLE, options=("-DX=1",))
    major, minor = nvrtc_version()
    assert cubin.command.startswith(f"nvrtc-{major}.{minor} --gpu-architecture=sm_90a -std=c++17 ")
    assert cubin.command.endswith(" -DX=1 k.cu")


def refused(*args, **kwargs):
    with pytest.raises(CompileError) as caught:
        compiled(*args, **kwargs)
    return caught.value


def test_an_error_names_file_line_and_source():
    header = "#pragma once\n\n__device__ int two() { return tow; }\n"
    error = refused('#include "two.cuh"\n', options=("-DX=1",), **{"two.cuh": header})
    version = ".".join(map(str, nvrtc_version()))
    first, line, options = str(error).splitlines()
    assert first == (
        f"NVRTC {version} could not compile k.cu for sm_90a: "
        'two.cuh(3): error: identifier "tow" is undefined'
    )
    assert line == "  line:    __device__ int two() { return tow; }"
    assert options.startswith("  options: --gpu-architecture=sm_90a -std=c++17 ")
    assert options.endswith(" -DX=1")
    assert "1 error detected" in error.log
    assert error.command.endswith(" -DX=1 k.cu")


def test_a_warning_is_not_taken_for_the_error():
    text = "#warning an error is coming\n__device__ int f() { return missing; }\n"
    assert 'k.cu(2): error: identifier "missing"' in str(refused(text))


def test_an_error_of_the_assembler_names_the_source_line():
    text = '#include "wait.cuh"\nextern "C" __global__ void k() {\n    wait();\n}\n'
    header = (
        "#pragma once\n__device__ __forceinline__ void wait() {\n"
        '    asm volatile("griddepcontrol.wait;");\n}\n'
    )
    error = refused(text, target_named("80"), **{"wait.cuh": header})
    told = str(error)
    assert "for sm_80: ptxas application ptx input, line " in told
    assert "requires .target sm_90 or higher" in told
    assert "\n  PTX:     griddepcontrol.wait;\n" in told
    assert '\n  line:    wait.cuh(3): asm volatile("griddepcontrol.wait;");\n' in told


def test_an_error_without_a_place_is_told_as_it_is():
    text = """extern "C" __global__ void k(int* a) {
        __shared__ int s[99999];
        s[a[0]] = 1;
        a[1] = s[a[2]];
    }"""
    assert "uses too much shared data" in str(refused(text))


def test_an_unknown_option_is_told():
    assert "unrecognized option --nonsense" in str(refused(TABLE, options=("--nonsense",)))


def test_only_given_sources_are_included(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stray.cuh").write_text("")
    error = refused('#include "stray.cuh"\n')
    assert 'k.cu(1): catastrophic error: could not open source file "stray.cuh"' in str(error)


def test_the_entry_must_be_given():
    with pytest.raises(ValueError, match=r"entry: got 'a\.cu', need one of the sources: b\.cu"):
        compile_cubin(HOPPER, {"b.cu": ""}, "a.cu")


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("", "it reports no kernel"),
        ("ptxas info : Compiling entry function 'k' for 'sm_90a'\nnew words", "cannot read .* k"),
    ],
)
def test_a_log_that_cannot_be_read_is_an_error(log, message):
    with pytest.raises(ValueError, match=message):
        resources(Cubin(b"", log, ""))


def test_missing_bindings_are_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ImportError, match=r"pip install 'reset-decoding\[gpu\]'"):
        compiled(TABLE)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (RuntimeError("libnvrtc.so.13 not found"), r"missing \(libnvrtc.*reset-decoding\[gpu\]"),
        ((0, 12, 4), r"got version 12\.4, need 12\.9 or newer"),
    ],
)
def test_a_missing_or_old_library_is_told(monkeypatch, version, message):
    from cuda.bindings import nvrtc

    def nvrtc_version_call():
        if isinstance(version, RuntimeError):
            raise version
        status, *numbers = version
        return nvrtc.nvrtcResult(status), *numbers

    monkeypatch.setattr(nvrtc, "nvrtcVersion", nvrtc_version_call)
    with pytest.raises(ImportError, match=message):
        compiled(TABLE)


def test_the_sources_of_the_package_are_found():
    found = kernel_sources()
    assert "nvfp4r.cu" in found
    assert list(found) == sorted(found)
    assert all(name.endswith((".cu", ".cuh")) for name in found)
    assert not [name for name, text in found.items() if "#include <" in text]  # no CUDA headers


def test_missing_sources_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr("nvfp4r.jit.sources.resources.files", lambda package: tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nvfp4r\.cu is missing.*install reset-decoding"):
        kernel_sources()
