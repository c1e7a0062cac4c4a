// Stages of weights that belong to one warp: filled by asynchronous copies, so that the bytes in
// flight depend neither on registers nor on where the compiler puts a load.
//
// sm_90 and later: one bulk copy a stage, completion by mbarrier. Before: cp.async by all lanes,
// completion in order. Stages are filled and read in the same cyclic order.
#pragma once
#include "ptx.cuh"

#if __CUDA_ARCH__ >= 900
#define NVFP4R_BULK 1
#else
#define NVFP4R_BULK 0
#endif

struct Ring {
    u32 stages;    // shared address of stage 0
    u32 barriers;  // shared address of the first mbarrier, 8 bytes each
#if NVFP4R_BULK
    u64 policy;
#endif

    __device__ __forceinline__ void init(u32 stages_, u32 barriers_, int depth, int lane) {
        stages = stages_;
        barriers = barriers_;
#if NVFP4R_BULK
        // Weights are read once: let them leave L2 first.
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        if (lane == 0) {
            for (int d = 0; d < depth; d++)
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barriers + 8 * d)
                             : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncwarp();
#endif
    }

    // Start copying `bytes` (a multiple of 16) to stage `slot`, whose content every lane has read.
    __device__ __forceinline__ void fill(int slot, u32 stage_bytes, const u8* source, u32 bytes,
                                         int lane) {
        const u32 target = stages + slot * stage_bytes;
#if NVFP4R_BULK
        if (lane == 0) {
            const u32 barrier = barriers + 8 * slot;
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                         :: "r"(barrier), "r"(bytes) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                         ".L2::cache_hint [%0], [%1], %2, [%3], %4;"
                         :: "r"(target), "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
                         : "memory");
        }
#else
        for (u32 at = 16 * lane; at < bytes; at += 512)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                         :: "r"(target + at), "l"(source + at) : "memory");
#endif
    }

    // Ends the copies of one stage, also where there was none: cp.async counts groups.
    __device__ __forceinline__ void commit() {
#if !NVFP4R_BULK
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }

    // Wait until stage `slot` is filled for the (parity + 1)-th time, modulo 2; it is the oldest of
    // DEPTH stages being filled.
    template <int DEPTH>
    __device__ __forceinline__ void wait(int slot, u32 parity) {
#if NVFP4R_BULK
        asm volatile("{\n.reg .pred done;\n"
                     "WAIT:\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                     "@done bra DONE;\n"
                     "bra WAIT;\n"
                     "DONE:\n}" :: "r"(barriers + 8 * slot), "r"(parity) : "memory");
#else
        asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 1) : "memory");
        __syncwarp();
#endif
    }
};
