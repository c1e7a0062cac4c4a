// Activations in the order in which linear_large multiplies them, so that it can copy a stage
// whole:
//
//     [K / 64][M / 8][j < 4][h < 2][token < 8][t < 4]
//
// pairs of values (4 bytes), where j, h, t say which: columns 64 * stage + 16 * t + 4 * j + 2 * h
// and the next. That is how a decoded word of weights lies in the registers of a warp
// (docs/layout.md): step j of 16 columns has columns of four blocks in it, one for each lane t.
// Tokens and columns that do not exist are zero.
#pragma once
#include "quantize.cuh"

struct ArrangeArgs {
    const u16* x;              // [M, K] fp16 or bf16
    u8* out;                   // [ceil(K / 64)][ceil(M / 8)][1024]
    const float* input_scale;  // [], or null
    int M, K;
    int prologue;              // what is done to x on its way (quantize.cuh)
};

// A warp takes 8 tokens x 64 columns, a lane one block of 16 columns.
template <int MODE>
__device__ __forceinline__ void arrange(const ArrangeArgs& p) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int stages = (p.K + 63) / 64, groups = (p.M + 7) / 8;
    const u64 count = (u64)stages * groups, step = (u64)gridDim.x * (blockDim.x >> 5);
    launch_dependents();
    wait_for_previous_kernel();
    const float scale = p.input_scale ? *p.input_scale : 0.f;
    for (u64 i = (u64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); i < count; i += step) {
        const int group = (int)(i / stages), stage = (int)(i % stages);
        const int token = 8 * group + g, column = 64 * stage + 16 * t;
        Block block = {};
        if (token < p.M && column < p.K) {
            block = load_block(p.x + (u64)token * p.K + column);
            if (p.prologue) prepare_block<MODE>(block.v, p.prologue, scale);
        }
        u32* out = (u32*)(p.out + ((u64)stage * groups + group) * 1024) + 4 * g + t;
#pragma unroll
        for (int q = 0; q < 8; q++) out[32 * q] = block.v[q];  // q = 2 * j + h
    }
}
