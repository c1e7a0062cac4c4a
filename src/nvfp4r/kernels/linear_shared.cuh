// y[M, N] = alpha * (x[M, K] w[N, K]^T) + bias for M <= 8 and an x that fits into shared memory.
//
// As linear_small, but a CTA fetches x once, and a warp of its own finishes the sums while the W
// warps go on with the next tile. For one or two tokens that is faster where K is short; and x is
// rotated or rounded to NVFP4 once a CTA, on its way into shared memory.
//
// Numbers: as linear_small.
#pragma once
#include "linear_small.cuh"

__device__ constexpr int kSumBuffers = 4;
// A token's 256 columns. 16 bytes more than they take: lanes that load together hit different
// banks.
__device__ constexpr u32 kSharedTokenBytes = 2 * 256 + 16;

// Sums over the warps, tile by tile, in a fixed order.
template <int MODE, int W>
__device__ __forceinline__ void finish_sums(const LinearArgs& p, int tile0, int tile1,
                                            const float* sums, u32 sums_full, int lane) {
    const float input_scale = p.input_scale ? *p.input_scale : 1.f;
    const int outputs = 16 * p.M;
    int slot = 0;
    u32 parity = 0;
    for (int tile = tile0; tile < tile1; tile++) {
        const int row = tile * 16 + (lane & 15);
        float alpha = 0.f, bias = 0.f;
        if (row < p.N) {
            alpha = p.alpha[row];
            if (p.bias) bias = MODE == X_BF16 ? bf16_to_f32(p.bias[row]) : f16_to_f32(p.bias[row]);
        }
        barrier_wait(sums_full + 8 * slot, parity);
        const float* buffer = sums + slot * W * outputs;
        for (int i = lane; i < outputs; i += 32) {
            float sum = 0.f;
#pragma unroll
            for (int w = 0; w < W; w++) sum += buffer[w * outputs + i];
            const float v = fmaf(sum * kDecodeFactor<MODE>, alpha * input_scale, bias);
            if (row < p.N)
                p.y[(u64)(i / 16) * p.N + row] = MODE == X_BF16 ? f32_to_bf16(v) : f32_to_f16(v);
        }
        __syncwarp();
        if (arrives(lane)) barrier_arrive(sums_full + 8 * (kSumBuffers + slot));
        if (++slot == kSumBuffers) { slot = 0; parity ^= 1; }
    }
}

// x to [K / 256][M][256 columns], prepared on the way; columns that do not exist are zero.
template <int MODE, int W>
__device__ __forceinline__ void fetch_x(const LinearArgs& p, u32 target) {
    constexpr int kAtOnce = 4;  // blocks a thread has on their way
    const int per_token = 8 * p.kblocks, count = per_token * p.M;  // blocks of 16 columns
    const float scale = p.input_scale ? *p.input_scale : 0.f;
    for (int first = threadIdx.x; first < count; first += kAtOnce * 32 * W) {
        Block block[kAtOnce] = {};
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
            const int at = first + i * 32 * W, token = at / per_token;
            const int column = 16 * (at - token * per_token);
            load_block_if<0>(block[i].v, p.x + (u64)token * p.K + column, column,
                             at < count ? p.K : 0);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
            const int at = first + i * 32 * W, token = at / per_token, k16 = at - token * per_token;
            if (at >= count) break;
            if (p.prologue) prepare_block<MODE>(block[i].v, p.prologue, scale);
            const u32 unit = (k16 >> 4) * p.M + token;
            store_block_shared(target + unit * kSharedTokenBytes + (k16 & 15) * 32, block[i]);
        }
    }
}

// linear_small_<dtype>_w<W>_s
template <int MODE, int W>
__device__ __forceinline__ void linear_shared(const LinearArgs& p) {
    constexpr u32 kStageBytes = W * kUnitBytes;
    extern __shared__ __align__(128) u8 shared[];
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0);
    const int chunks = (p.kblocks + 2 * W - 1) / (2 * W);  // stages of one tile
    const u32 unit_bytes = p.M * kSharedTokenBytes;        // 256 columns of x
    const u32 x_at = shared_address(shared), base = x_at + chunks * W * unit_bytes;
    const u32 full = base + p.depth * kStageBytes, sums_full = full + 16 * p.depth;
    float* sums = (float*)(shared + (sums_full + 16 * kSumBuffers - x_at));
    const int tile0 = (int)((long long)p.tiles * blockIdx.x / gridDim.x);
    const int tile1 = (int)((long long)p.tiles * (blockIdx.x + 1) / gridDim.x);
    if (threadIdx.x == 0) {
        for (int d = 0; d < p.depth; d++) {
            barrier_init(full + 8 * d, kFullArrivals);
            barrier_init(full + 8 * (p.depth + d), W * kWarpArrivals);
        }
        for (int b = 0; b < kSumBuffers; b++) {
            barrier_init(sums_full + 8 * b, W * kWarpArrivals);
            barrier_init(sums_full + 8 * (kSumBuffers + b), kWarpArrivals);
        }
        publish_barriers();
    }
    __syncthreads();
    launch_dependents();
    if (warp == W) {
        produce<W>(p, tile0, tile1, chunks, base, full, lane);
        return;
    }
    wait_for_previous_kernel();
    if (warp == W + 1) {
        finish_sums<MODE, W>(p, tile0, tile1, sums, sums_full, lane);
        return;
    }
    fetch_x<MODE, W>(p, x_at);
    asm volatile("bar.sync 1, %0;" :: "n"(32 * W) : "memory");  // the warps that multiply

    // A lane without a token multiplies another's; its sums go nowhere.
    u32 words_at = base + warp * kUnitBytes + 16 * lane;
    u32 scales_at = base + warp * kUnitBytes + 1024 + 4 * lane;
    u32 x_first = x_at + warp * unit_bytes + min(g, p.M - 1) * kSharedTokenBytes + t * 32;
    keep(words_at);
    keep(scales_at);
    keep(x_first);
    u32 stage = 0, barrier = full, parity = 0;
    const u32 ring_bytes = p.depth * kStageBytes, x_step = W * unit_bytes;
    int slot = 0;
    u32 sums_parity = 1;  // the first round finds every buffer empty
    for (int tile = tile0; tile < tile1; tile++) {
        float acc[4] = {};
        u32 x_now = x_first;
        int left = p.kblocks - 2 * warp;  // blocks of 128 columns from here on
        for (int chunk = 0; chunk < chunks; chunk++) {
            barrier_wait(barrier, parity);
            auto multiply_block = [&](int k) {
                const u32 at = stage + k * kTileBytes, x = x_now + k * 256;
                const Vec4 words0 = load_shared_16(words_at + at);
                const Vec4 words1 = load_shared_16(words_at + at + 512);
                const u32 scales = load_shared_4(scales_at + at);
                multiply_half<MODE>(acc, words0, decode_scales<MODE>(scales, 0),
                                    load_block_shared(x));
                multiply_half<MODE>(acc, words1, decode_scales<MODE>(scales, 1),
                                    load_block_shared(x + 128));
            };
            if (left > 0) multiply_block(0);
            if (left > 1) multiply_block(1);
            left -= 2 * W;
            __syncwarp();
            if (arrives(lane)) barrier_arrive(barrier + 8 * p.depth);
            stage += kStageBytes;
            barrier += 8;
            x_now += x_step;
            if (stage == ring_bytes) { stage = 0; barrier = full; parity ^= 1; }
        }
        barrier_wait(sums_full + 8 * (kSumBuffers + slot), sums_parity);
        float* part = sums + (slot * W + warp) * 16 * p.M;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = 2 * t + i;
            if (token < p.M) {
                part[token * 16 + g] = acc[i];
                part[token * 16 + g + 8] = acc[2 + i];
            }
        }
        __syncwarp();
        if (arrives(lane)) barrier_arrive(sums_full + 8 * slot);
        if (++slot == kSumBuffers) { slot = 0; sums_parity ^= 1; }
    }
}
