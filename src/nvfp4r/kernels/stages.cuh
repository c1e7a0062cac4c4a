// A ring of stages in shared memory: a producer warp fills them by asynchronous copies, consumer
// warps read them. Each stage has a `full` barrier and, 8 * depth bytes further, an `empty` one.
//
// With bulk copies (sm_90 and later) one lane issues a copy a piece; before, all lanes copy 16 bytes
// at a time. Either way the bytes in flight depend neither on registers nor on where the compiler
// would have put a load.
#pragma once
#include "ptx.cuh"

__device__ constexpr u32 kFullArrivals = NVFP4R_HAS_BULK_COPY ? 1 : 32;

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}

#if NVFP4R_HAS_BULK_COPY
// What this thread wrote to shared memory is seen by bulk copies and wgmma that come after it.
__device__ __forceinline__ void fence_for_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#endif

// After barrier_init, before the __syncthreads that publishes it.
__device__ __forceinline__ void publish_barriers() {
#if NVFP4R_HAS_BULK_COPY
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_for_async();
#endif
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("{\n.reg .b64 s;\nmbarrier.arrive.shared.b64 s, [%0];\n}" :: "r"(barrier)
                 : "memory");
}

// What a warp's arrival counts: one lane arrives, behind a __syncwarp or an instruction of the whole
// warp that orders what the others have read or written. NVIDIA's racecheck knows the order that
// comes from barriers alone, so that it is given kernels in which every lane arrives.
#if NVFP4R_EVERY_LANE_ARRIVES
__device__ constexpr u32 kWarpArrivals = 32;
#else
__device__ constexpr u32 kWarpArrivals = 1;
#endif
__device__ __forceinline__ bool arrives(int lane) { return kWarpArrivals > 1 || lane == 0; }

// Wait until the phase with this parity is complete.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{\n.reg .pred done;\n"
                 "WAIT:\n"
#if NVFP4R_HAS_BULK_COPY
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#else
                 "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
#endif
                 "@done bra DONE;\n"
                 "bra WAIT;\n"
                 "DONE:\n}" :: "r"(barrier), "r"(parity) : "memory");
}

#if NVFP4R_HAS_BULK_COPY
// `bytes` of bulk copies are about to be started for this phase; one arrival.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(barrier), "r"(bytes) : "memory");
}

// By one thread; addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void copy_bulk(u32 target, const void* source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];"
                 :: "r"(target), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}
#endif

// 16 bytes of this lane; both addresses are multiples of 16.
__device__ __forceinline__ void copy_async_16(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(target), "l"(source)
                 : "memory");
}

// This lane's arrival, once all its copies so far are in place.
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(barrier) : "memory");
}

// The producer's side. Every lane of its warp calls these with the same arguments.
struct Producer {
    int lane;
    u64 policy;

    __device__ __forceinline__ explicit Producer(int lane_) : lane(lane_), policy(0) {
#if NVFP4R_HAS_BULK_COPY
        // Weights are read once: let them leave L2 first.
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    }

    // A stage of `bytes` in all is about to be copied.
    __device__ __forceinline__ void begin(u32 full, u32 bytes) const {
#if NVFP4R_HAS_BULK_COPY
        if (lane == 0) barrier_expect(full, bytes);
#endif
    }

    // Copy a piece of it; source and target are 16-byte aligned, `bytes` is a multiple of 16.
    __device__ __forceinline__ void copy(u32 full, u32 target, const u8* source, u32 bytes) const {
#if NVFP4R_HAS_BULK_COPY
        if (lane == 0)
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                         ".L2::cache_hint [%0], [%1], %2, [%3], %4;"
                         :: "r"(target), "l"(source), "r"(bytes), "r"(full), "l"(policy)
                         : "memory");
#else
        for (u32 at = 16 * lane; at < bytes; at += 512) copy_async_16(target + at, source + at);
#endif
    }

    // All pieces are on their way; `full` completes when they have arrived.
    __device__ __forceinline__ void end(u32 full) const {
#if !NVFP4R_HAS_BULK_COPY
        arrive_after_copies(full);
#endif
    }
};
