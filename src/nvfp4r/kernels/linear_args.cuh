// What the matrix kernels are given, and the size of a tile.
#pragma once
#include "ptx.cuh"

struct LinearArgs {
    const u8* weight;          // [tiles][kblocks][1152] (docs/layout.md)
    const u16* x;              // [M, K] fp16 or bf16
    u16* y;                    // [M, N], x's dtype
    const float* alpha;        // [N]
    const u16* bias;           // [N], x's dtype, or null
    const float* input_scale;  // [], of activations that are or will be quantised, or null
    int M, N, K;
    int tiles;                 // ceil(N / 16)
    int kblocks;               // ceil(K / 128)
    int depth;                 // stages of the ring
    int x_depth;               // stages of the ring of x, where there is one
    int prologue;              // what linear_shared does to x on its way (quantize.cuh)
};

__device__ constexpr int kTileBytes = 1152;  // 16 rows x 128 columns: 2 x 512 codes, 128 scales
__device__ constexpr int kUnitBytes = 2 * kTileBytes;
