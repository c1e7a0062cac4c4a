"""Which GPU gets which build, and that the compiler agrees with what each build may use."""

import re
import subprocess
import sys

import pytest

from nvfp4r.jit import (
    FURTHER_TARGETS,
    TARGETS,
    CompileError,
    UnsupportedGPUError,
    compile_cubin,
    target_for,
    target_named,
)

# D2 of the field reports: capability -> (target, FP4 conversion, cluster and PDL).
PATHS = {
    (8, 0): ("80", False, False),
    (8, 6): ("86", False, False),
    (8, 7): ("87", False, False),
    (8, 9): ("89", False, False),
    (9, 0): ("90a", False, True),
    (10, 0): ("100a", True, True),
    (10, 3): ("103a", True, True),
    (12, 0): ("120a", True, True),
    (12, 1): ("121a", True, True),
    (10, 7): ("100f", True, True),  # members of known families that are newer than the table
    (12, 4): ("120f", True, True),
}
UNSUPPORTED = [(7, 5), (6, 1), (9, 1), (10, 1), (11, 0), (13, 0), (20, 0)]

# One instruction for each claim of `Target`; `a` points to global memory.
INSTRUCTIONS = {
    "has_fp4_convert": (
        "{ .reg .b8 b; .reg .b32 w, r; ld.global.b32 w, [%0]; cvt.u8.u32 b, w; "
        "cvt.rn.f16x2.e2m1x2 r, b; st.global.b32 [%0], r; }"
    ),
    "has_e4m3_convert": (
        "{ .reg .b16 h; .reg .b32 r; ld.global.b16 h, [%0]; cvt.rn.f16x2.e4m3x2 r, h; "
        "st.global.b32 [%0], r; }"
    ),
    "has_bulk_copy": "cp.async.bulk.prefetch.L2.global [%0], 256;",
    "has_cluster": "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
    "has_pdl": "griddepcontrol.wait; griddepcontrol.launch_dependents;",
    "has_256_bit_loads": (
        "{ .reg .b32 r<8>; ld.global.nc.L2::evict_first.v8.b32 {r0,r1,r2,r3,r4,r5,r6,r7}, [%0]; "
        "st.global.b32 [%0], r7; }"
    ),
    "has_wgmma": (
        "{ .reg .b32 a<4>; .reg .b64 b; .reg .f32 d<4>; ld.global.v4.b32 {a0, a1, a2, a3}, [%0]; "
        "ld.global.b64 b, [%0 + 16]; ld.global.v4.f32 {d0, d1, d2, d3}, [%0 + 32]; "
        "wgmma.fence.sync.aligned; "
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {d0, d1, d2, d3}, {a0, a1, a2, a3}, b, "
        "1, 1, 1, 0; wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; "
        "st.global.v4.f32 [%0], {d0, d1, d2, d3}; }"
    ),
}
ENCODE = (
    "{ .reg .b8 b; .reg .f32 f; .reg .b32 r; ld.global.f32 f, [%0]; "
    "cvt.rn.satfinite.e2m1x2.f32 b, f, f; cvt.u32.u8 r, b; st.global.b32 [%0], r; }"
)


def accepts(target, instructions):
    source = f"""extern "C" __global__ void k(unsigned* a) {{
        asm volatile("{instructions}" :: "l"(a) : "memory");
    }}"""
    try:
        compile_cubin(target, {"probe.cu": source}, "probe.cu")
    except CompileError as error:
        if not re.search(r"ptxas .* (requires|not supported on) \.target", error.log):
            raise  # a mistake of this test
        return False
    return True


@pytest.mark.parametrize(("capability", "path"), PATHS.items())
def test_d2_each_gpu_gets_the_path_of_its_family(capability, path):
    name, has_fp4_convert, has_cluster_and_pdl = path
    target = target_for(capability)
    assert target.name == name
    assert target.sm == f"sm_{name}"
    assert target.has_fp4_convert is has_fp4_convert
    assert target.has_cluster is target.has_pdl is target.has_bulk_copy is has_cluster_and_pdl
    assert target.has_e4m3_convert is (capability >= (8, 9))
    assert target.has_wgmma is (capability == (9, 0))
    assert target_named(name) is target


def test_every_target_serves_some_gpu():
    assert {name for name, _, _ in PATHS.values()} == {*TARGETS, *FURTHER_TARGETS}


@pytest.mark.parametrize("capability", UNSUPPORTED)
def test_d1_a_gpu_without_a_build_is_told_what_is_built(capability):
    major, minor = capability
    with pytest.raises(UnsupportedGPUError) as caught:
        target_for(capability)
    text = str(caught.value)
    assert text.startswith(f"this GPU has compute capability {major}.{minor}; ")
    assert "9.0, 10.0, 10.3, 10.4 and later, 12.0, 12.1, 12.2 and later" in text
    assert ("came with 8.0" in text) is (major < 8)
    assert "dequantised" in text


def test_an_unknown_target_is_refused():
    with pytest.raises(ValueError, match=r"target: got '90', need one of 80, 86, 87, 89, 90a"):
        target_named("90")


@pytest.mark.parametrize("name", [*TARGETS, *FURTHER_TARGETS])
def test_d3_the_compiler_agrees_with_the_table(name):
    target = target_named(name)
    claimed = {claim: getattr(target, claim) for claim in INSTRUCTIONS}
    assert claimed == {claim: accepts(target, text) for claim, text in INSTRUCTIONS.items()}
    assert accepts(target, ENCODE) is target.has_fp4_convert  # both directions, or none


def test_claims_reach_the_sources_as_macros():
    assert target_named("89").defines == (
        "-DNVFP4R_HAS_FP4_CONVERT=0",
        "-DNVFP4R_HAS_E4M3_CONVERT=1",
        "-DNVFP4R_HAS_BULK_COPY=0",
        "-DNVFP4R_HAS_CLUSTER=0",
        "-DNVFP4R_HAS_PDL=0",
        "-DNVFP4R_HAS_256_BIT_LOADS=0",
        "-DNVFP4R_HAS_WGMMA=0",
    )
    for name, absent in (
        ("121a", {"has_wgmma"}),
        ("90a", {"has_fp4_convert", "has_256_bit_loads"}),
    ):
        assert set(target_named(name).defines) == {
            f"-DNVFP4R_{claim.upper()}={int(claim not in absent)}" for claim in INSTRUCTIONS
        }


@pytest.mark.parametrize(
    ("name", "per_block_kib", "per_sm_kib"),
    [("80", 163, 164), ("86", 99, 100), ("90a", 227, 228), ("100a", 227, 228), ("120a", 99, 100)],
)
def test_shared_memory_is_that_of_the_programming_guide(name, per_block_kib, per_sm_kib):
    target = target_named(name)
    assert target.shared_bytes_per_block == per_block_kib * 1024
    assert target.shared_bytes_per_sm == per_sm_kib * 1024


def test_importing_needs_no_cuda_package():
    code = "import sys; sys.modules['cuda'] = None; import nvfp4r.jit; print('imported')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "imported\n", done.stderr
