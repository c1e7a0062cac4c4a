// What linear_large is given and how its CTAs share it.
#pragma once
#include "cluster.cuh"
#include "linear_args.cuh"

struct LargeArgs {
    const u8* weight;          // [tiles][kblocks][1152] (docs/layout.md)
    const u8* x;               // [ceil(K / 64)][ceil(M / 8)][1024] (arrange.cuh)
    u16* y;                    // [M, N] fp16 or bf16
    const float* alpha;        // [N]
    const u16* bias;           // [N], or null
    const float* input_scale;  // [], of activations that were quantised, or null
    int M, N, K;
    int tiles;                 // ceil(N / 16)
    int kblocks;               // ceil(K / 128)
    int depth;                 // stages of each warp's ring of weights, of 256 columns
    int x_depth;               // stages of the ring of x, of 64 columns
    int row_units;             // parts of the row tiles, of at most 8 RT each
};

__device__ constexpr int kLargeWarps = 8;  // that multiply

// With more accumulators the warps that multiply need registers of the others.
__device__ constexpr bool moves_registers(int NT, int RT) { return NT * RT > 16; }
__device__ constexpr int large_threads(int NT, int RT) {
    return 32 * kLargeWarps + (moves_registers(NT, RT) ? 128 : 32);  // a warpgroup, then
}

// A unit of work: neighbours in number share their row tiles, so that weights come from L2.
struct Unit {
    int token_tile, tile, tiles;

    __device__ __forceinline__ Unit(const LargeArgs& p, int u, int token_tiles) {
        const int row = u / token_tiles;
        token_tile = u - row * token_tiles;
        tile = (int)((long long)p.tiles * row / p.row_units);
        tiles = (int)((long long)p.tiles * (row + 1) / p.row_units) - tile;
    }
    // Tiles of a warp: its number, and 8 further.
    __device__ __forceinline__ int tiles_of(int warp) const {
        const int after = tiles - warp;
        return after <= 0 ? 0 : (after + kLargeWarps - 1) / kLargeWarps;
    }
};

// What all warps of a CTA agree on.
struct LargeWork {
    int first, step, units, token_tiles;
    int chunk0, chunk1;  // of 256 columns: this block's share of K
    int stage0, stages;  // of 64 columns, likewise

    __device__ __forceinline__ LargeWork(const LargeArgs& p, const Cluster& cluster, int tokens) {
        const int rank = (int)cluster.rank, size = (int)cluster.size;
        first = blockIdx.x / size;
        step = gridDim.x / size;
        token_tiles = (p.M + tokens - 1) / tokens;
        units = token_tiles * p.row_units;
        const int chunks = (p.kblocks + 1) / 2;
        chunk0 = chunks * rank / size;
        chunk1 = chunks * (rank + 1) / size;
        stage0 = 4 * chunk0;
        stages = max(0, min(4 * chunk1, (p.K + 63) / 64) - stage0);
    }
};
