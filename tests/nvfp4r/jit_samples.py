"""Small CUDA sources for the tests of nvfp4r.jit, in the style of the real ones.

`SOURCES` uses the instructions that the kernels rest on, each where the target has it; every kernel
has one structure as its parameter. `faults` is the check that the real kernels have to pass.
"""

from __future__ import annotations

import struct

from nvfp4r.jit import Resources

ENTRY = "sample.cu"

PTX = r"""
#pragma once
typedef unsigned u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void copy_async_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_done() {
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
}
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#if NVFP4R_HAS_WGMMA
__device__ __forceinline__ void wgmma(float (&d)[8], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, "
        "{%8,%9,%10,%11}, %12, 1, 1, 1, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}
#endif
#if NVFP4R_HAS_PDL
__device__ __forceinline__ void wait_for_predecessor() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_successor_start() {
    asm volatile("griddepcontrol.launch_dependents;");
}
#else
__device__ __forceinline__ void wait_for_predecessor() {}
__device__ __forceinline__ void let_successor_start() {}
#endif
#if NVFP4R_HAS_CLUSTER
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 load_from_peer(u32 address, u32 rank) {
    u32 d;
    asm volatile("{\n.reg .u32 a;\nmapa.shared::cluster.u32 a, %1, %2;\n"
                 "ld.shared::cluster.u32 %0, [a];\n}"
                 : "=r"(d) : "r"(address), "r"(rank) : "memory");
    return d;
}
#endif
"""

SAMPLE = r"""
#include "ptx.cuh"

struct ScaleArgs { float* out; const float* in; float factor; int n; };
extern "C" __global__ void __launch_bounds__(256) scale(const __grid_constant__ ScaleArgs p) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.out[i] = p.in[i] * p.factor;
}

// One warp: 16 x 16 halves times 16 x 8, through shared memory.
struct TileArgs { const u32* a; const u32* b; float* d; };
extern "C" __global__ void __launch_bounds__(32) tile(const __grid_constant__ TileArgs p) {
    __shared__ alignas(16) u32 a_words[32 * 4];
    const int lane = threadIdx.x;
    copy_async_16(shared_address(a_words + 4 * lane), p.a + 4 * lane);
    copies_done();
    const u32 a[4] = {a_words[4 * lane], a_words[4 * lane + 1], a_words[4 * lane + 2],
                      a_words[4 * lane + 3]};
    const u32 b[2] = {p.b[2 * lane], p.b[2 * lane + 1]};
    float d[4] = {};
    mma(d, a, b);
    for (int i = 0; i < 4; i++) p.d[4 * lane + i] = d[i];
}

#if NVFP4R_HAS_WGMMA
// A warpgroup: 64 x 16 halves in registers times 16 x 16 in shared memory, whose columns come in
// groups of 8: 128 bytes for each half of k16, and 1024 to the next group.
struct GroupTileArgs { const u32* a; const u32* b; float* d; };
extern "C" __global__ void __launch_bounds__(128) group_tile(
    const __grid_constant__ GroupTileArgs p) {
    __shared__ alignas(128) u32 b_words[2 * 256];
    const int thread = threadIdx.x;
    for (int i = thread; i < 2 * 256; i += 128) b_words[i] = p.b[i];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    u32 a[4];
    for (int i = 0; i < 4; i++) a[i] = p.a[4 * thread + i];
    float d[8] = {};
    wgmma(d, a, (u64)(shared_address(b_words) >> 4) | 8ull << 16 | 64ull << 32);
    for (int i = 0; i < 8; i++) p.d[8 * thread + i] = d[i];
}
#endif

// Writes the last word of its dynamic shared memory and reads it back.
struct LastWordArgs { u32* out; int words; };
extern "C" __global__ void last_word(const __grid_constant__ LastWordArgs p) {
    extern __shared__ u32 words[];
    words[p.words - 1 - threadIdx.x] = 1000 * blockIdx.x + threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) p.out[blockIdx.x] = words[p.words - 1];
}

// out[i] = in[i] + 1, slowly, and letting the successor start at once.
struct StepArgs { const int* in; int* out; int n; int spin_clocks; };
extern "C" __global__ void step(const __grid_constant__ StepArgs p) {
    let_successor_start();
    wait_for_predecessor();
    const long long start = clock64();
    while (clock64() - start < p.spin_clocks) {
    }
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.out[i] = p.in[i] + 1;
}

// When this block started and ended, in ns; it waits for nobody.
struct StampArgs { u64* out; u64 spin_ns; };
extern "C" __global__ void stamp(const __grid_constant__ StampArgs p) {
    u64 start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    let_successor_start();
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < p.spin_ns);
    p.out[0] = start;
    p.out[1] = now;
}

#if NVFP4R_HAS_CLUSTER
// Block i gets the word that the other block of its pair wrote into its own shared memory.
struct ExchangeArgs { u32* out; };
extern "C" __global__ void exchange(const __grid_constant__ ExchangeArgs p) {
    __shared__ u32 word;
    if (threadIdx.x == 0) word = 100 + blockIdx.x;
    cluster_barrier();
    const u32 peer = 1 ^ (blockIdx.x & 1);
    if (threadIdx.x == 0) p.out[blockIdx.x] = load_from_peer(shared_address(&word), peer);
    cluster_barrier();
}
#endif

#if NVFP4R_HAS_BULK_COPY
// 512 bytes to shared memory by one bulk copy, counted by an mbarrier, and out again.
struct BulkArgs { const u32* in; u32* out; };
extern "C" __global__ void __launch_bounds__(128) bulk(const __grid_constant__ BulkArgs p) {
    __shared__ alignas(128) u32 words[128];
    __shared__ alignas(8) u64 barrier;
    const u32 to = shared_address(words), counter = shared_address(&barrier);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(counter) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;" ::"r"(counter)
                     : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 512, "
            "[%2];" ::"r"(to), "l"(p.in), "r"(counter) : "memory");
    }
    __syncthreads();
    u32 done = 0;
    while (!done)
        asm volatile("{\n.reg .pred q;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 q, [%1], 0;\n"
                     "selp.u32 %0, 1, 0, q;\n}"
                     : "=r"(done) : "r"(counter) : "memory");
    p.out[threadIdx.x] = words[threadIdx.x];
}
#endif

#if NVFP4R_HAS_FP4_CONVERT
struct DecodeArgs { const u32* codes; u32* pairs; };
extern "C" __global__ void decode(const __grid_constant__ DecodeArgs p) {
    u32 d;
    asm("{\n.reg .b8 b;\ncvt.u8.u32 b, %1;\ncvt.rn.f16x2.e2m1x2 %0, b;\n}"
        : "=r"(d) : "r"(p.codes[threadIdx.x]));
    p.pairs[threadIdx.x] = d;
}
#endif
"""

SOURCES = {ENTRY: SAMPLE, "ptx.cuh": PTX}

# The same structures for Python; "0P" pads the end like C does.
scale_args = struct.Struct("@PPfi0P").pack
tile_args = struct.Struct("@PPP").pack  # of group_tile too
last_word_args = struct.Struct("@Pi0P").pack
step_args = struct.Struct("@PPii0P").pack
stamp_args = struct.Struct("@PQ").pack
exchange_args = struct.Struct("@P").pack
bulk_args = struct.Struct("@PP").pack

# Forty live values: 2 x 1024 threads per SM leave 32 registers each, which cannot hold them.
SPILLING = r"""
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* a, int n) {
    float v[40];
#pragma unroll
    for (int i = 0; i < 40; i++) v[i] = a[32 * i + threadIdx.x];
    for (int j = 0; j < n; j++) {
#pragma unroll
        for (int i = 0; i < 40; i++) v[i] = v[i] * v[(i * 7 + 3) % 40] + a[j];
    }
#pragma unroll
    for (int i = 0; i < 40; i++) a[32 * i + threadIdx.x] = v[i];
}
"""

# A table that is indexed at run time lies in local memory though nothing is spilled.
TABLE = r"""
extern "C" __global__ void table(float* a, const int* codes) {
    float values[16];
    for (int i = 0; i < 16; i++) values[codes[i] & 15] = a[i];
    a[threadIdx.x] = values[codes[threadIdx.x] & 15];
}
"""


def faults(found: dict[str, Resources], *, register_ceiling: int) -> list[str]:
    """What the kernels of a build must not do: use local memory, or too many registers."""
    told = []
    for name, used in sorted(found.items()):
        if used.spill_bytes:
            told.append(f"{name} spills {used.spill_bytes} bytes")
        if used.stack_bytes:
            told.append(f"{name} keeps {used.stack_bytes} bytes in local memory")
        if used.registers > register_ceiling:
            told.append(f"{name} uses {used.registers} registers, more than {register_ceiling}")
    return told
