// A ring of weight stages that belongs to one warp: filled by asynchronous copies, so that the
// bytes in flight do not depend on registers or on where the compiler puts a load.
//
// sm_90 and later: one bulk copy a stage, completion by mbarrier. Before: cp.async by all lanes.
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
    u32 stage_bytes;
    int depth;
    int slot;      // stage to be read next
    u32 parity;    // of its mbarrier
    int fill_slot; // stage to be filled next
#if NVFP4R_BULK
    u64 policy;
#endif

    __device__ __forceinline__ void init(u32 stages_, u32 barriers_, u32 stage_bytes_, int depth_,
                                         int lane) {
        stages = stages_; barriers = barriers_; stage_bytes = stage_bytes_; depth = depth_;
        slot = 0; parity = 0; fill_slot = 0;
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

    // Start copying `bytes` (a multiple of 16, at most stage_bytes) into the next free stage.
    __device__ __forceinline__ void fill(const u8* source, u32 bytes, int lane) {
        const u32 target = stages + fill_slot * stage_bytes;
#if NVFP4R_BULK
        if (lane == 0) {
            const u32 barrier = barriers + 8 * fill_slot;
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
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
        fill_slot = fill_slot + 1 == depth ? 0 : fill_slot + 1;
    }

    // cp.async counts groups: where there is nothing left to fill, an empty group keeps the count.
    __device__ __forceinline__ void fill_nothing() {
#if !NVFP4R_BULK
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }

    // Wait for the oldest stage; returns its shared address.
    __device__ __forceinline__ u32 wait() {
#if NVFP4R_BULK
        const u32 barrier = barriers + 8 * slot;
        asm volatile("{\n.reg .pred done;\n"
                     "WAIT:\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                     "@done bra DONE;\n"
                     "bra WAIT;\n"
                     "DONE:\n}" :: "r"(barrier), "r"(parity) : "memory");
#else
        // The oldest of `depth` groups: depth is 2, 3 or 4 (the plan's choice), else wait for all.
        switch (depth) {
            case 2: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
            case 3: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
            case 4: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
            default: asm volatile("cp.async.wait_group 0;" ::: "memory");
        }
        __syncwarp();
#endif
        return stages + slot * stage_bytes;
    }

    // The stage has been read by every lane (the caller synchronises the warp): move on.
    __device__ __forceinline__ void advance() {
        if (++slot == depth) { slot = 0; parity ^= 1; }
    }
};
