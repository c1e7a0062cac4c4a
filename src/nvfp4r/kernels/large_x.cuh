// How x comes into shared memory for linear_large, in the order of arrange.cuh: copied, if a kernel
// before has put it into that order, or arranged on the way (direct).
#pragma once
#include "large_work.cuh"
#include "quantize.cuh"
#include "stages.cuh"
#include "wgmma.cuh"

// Copies x, a stage of 64 columns at a time, for all units of this CTA.
template <int NT>
__device__ __forceinline__ void copy_x(const LargeArgs& p, const LargeWork& work, u32 x_stages,
                                       u32 full, u32 empty, int lane, const Cluster& cluster) {
    const int groups = (p.M + 7) / 8;
    int slot = 0;
    u32 parity = 1;
    for (int u = work.first; u < work.units; u += work.step) {
        const int group = (u % work.token_tiles) * NT;
        const u32 bytes = min(NT, groups - group) * 1024;
        const u8* source = p.x + ((u64)work.stage0 * groups + group) * 1024;
        for (int s = 0; s < work.stages; s++, source += (u64)groups * 1024) {
            const u32 barrier = full + 8 * slot;
            barrier_wait(empty + 8 * slot, parity);
            if (lane == 0) {
                barrier_expect(barrier, bytes);
                copy_bulk(x_stages + slot * NT * 1024, source, bytes, barrier);
            }
            if (++slot == p.x_depth) { slot = 0; parity ^= 1; }
        }
        if (cluster.size > 1) { cluster.sync(); cluster.sync(); }
    }
}

// Arranges x on its way, for all units of this CTA. A pair of warps takes every fourth stage of 64
// columns, each half of the tokens; a lane takes blocks of 16 columns, as in arrange.cuh.
//
// A pair knows a stage of the ring by the parity of its turn alone. So it must not be two turns
// ahead, and is not with at least four stages: before its last one the ring was free up to there.
template <int NT>
__device__ __forceinline__ void arrange_x(const LargeArgs& p, const LargeWork& work, u32 x_stages,
                                          u32 full, u32 empty, int warp, int lane,
                                          const Cluster& cluster) {
    constexpr int kGroups = NT / 2, kBatch = kGroups < 8 ? kGroups : 8;
    const int g = lane >> 2, t = lane & 3, pair = warp >> 1, group0 = (warp & 1) * kGroups;
    int before = 0;  // stages of earlier units
    for (int u = work.first; u < work.units; u += work.step, before += work.stages) {
        const int token0 = (u % work.token_tiles * NT + group0) * 8 + g;
        for (int s = (pair - before) & 3; s < work.stages; s += 4) {
            const int turn = (before + s) / p.x_depth, slot = before + s - turn * p.x_depth;
            const int column = (work.stage0 + s) * 64 + 16 * t;
            const u32 target = x_stages + (slot * NT + group0) * 1024 + 16 * lane;
#pragma unroll
            for (int first = 0; first < kGroups; first += kBatch) {
                Block block[kBatch] = {};
#pragma unroll
                for (int i = 0; i < kBatch; i++) {
                    const int token = token0 + 8 * (first + i);
                    load_block_if<0>(block[i].v, p.x + ((u64)token * p.K + column) * 2, column,
                                     token < p.M ? p.K : 0);
                }
                if (first == 0) barrier_wait(empty + 8 * slot, ~turn & 1);
#pragma unroll
                for (int i = 0; i < kBatch; i++) {
                    const u32 (&v)[8] = block[i].v;
                    store_matrices(target + (first + i) * 1024, v[0], v[1], v[2], v[3]);
                    store_matrices(target + (first + i) * 1024 + 512, v[4], v[5], v[6], v[7]);
                }
            }
            fence_for_async();
            __syncwarp();
            if (arrives(lane)) barrier_arrive(full + 8 * slot);
        }
        if (cluster.size > 1) { cluster.sync(); cluster.sync(); }
    }
}
