// Rows of a packed weight as an ordinary matrix of e2m1 * e4m3, without alpha, for dense products.
#pragma once
#include "decode.cuh"
#include "linear_args.cuh"
#include "quantize.cuh"

struct UnpackArgs {
    const u8* weight;  // [tiles][kblocks][1152], from the first tile wanted
    u16* out;          // [rows, K] fp16 or bf16
    int rows, K, tiles, kblocks;
};

// A warp takes a tile of 16 x 128. A lane holds whole blocks of 16 columns, so it writes 32 bytes.
template <int MODE>
__device__ __forceinline__ void unpack(const UnpackArgs& p) {
    constexpr u32 kFactor = MODE == X_BF16 ? 0x43804380u : 0x58005800u;  // kDecodeFactor, twice
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u64 count = (u64)p.tiles * p.kblocks, step = (u64)gridDim.x * (blockDim.x >> 5);
    launch_dependents();
    wait_for_previous_kernel();
    for (u64 i = (u64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); i < count; i += step) {
        const int tile = (int)(i / p.kblocks), kblock = (int)(i % p.kblocks);
        const u8* from = p.weight + i * kTileBytes;
        const u32 bytes = *(const u32*)(from + 1024 + 4 * lane);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const Vec4 words = *(const Vec4*)(from + 512 * h + 16 * lane);
            const u32 scales = decode_scales<MODE>(bytes, h);
            const u32 low = both_low(scales), high = both_high(scales);
            Block row[2];  // g and g + 8
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 a[4];
                decode_word<MODE>(words.v[j], a);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const u32 scale = r ? high : low;
#pragma unroll
                    for (int c = 0; c < 2; c++)
                        row[r].v[2 * j + c] = multiply_pairs<MODE>(
                            multiply_pairs<MODE>(a[2 * c + r], scale), kFactor);
                }
            }
            const int column = 128 * kblock + 64 * h + 16 * t;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int at = 16 * tile + g + 8 * r;
                if (at < p.rows && column < p.K) store_block(p.out + (u64)at * p.K + column, row[r]);
            }
        }
    }
}
