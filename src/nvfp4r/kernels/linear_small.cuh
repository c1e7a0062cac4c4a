// y[M, N] = alpha * (x[M, K] w[N, K]^T) + bias for M <= 8, every weight read once.
//
// A CTA walks over row tiles of 16 outputs. Its W consumer warps share K: in a stage, warp w takes
// the 256 columns 256 (W s + w), so that a stage is contiguous in memory. A producer warp keeps a
// ring of stages full; it never waits for the kernel before, as weights do not depend on it. A
// consumer holds the activations of its 256 columns in registers and loads the next ones as soon as
// it has used them. The sums of the W warps meet in shared memory once per tile.
//
// What bounds it (H200, docs/log.md): about 20 issued instructions per 256 weights, and some 2 us of
// each launch in which the stream of weights stands still.
//
// It never prepares x, which would be done anew for every tile: linear_shared does, or a kernel before.
//
// Numbers: products of code, block scale and activation are exact in the tensor core; sums are
// float32, in an order that depends on the plan alone and never on M. alpha is applied in float32.
#pragma once
#include "linear_args.cuh"
#include "quantize.cuh"
#include "stages.cuh"

// One 16 x 64 half tile: 4 words and 2 scales a lane, and 16 columns of x.
template <int MODE>
__device__ __forceinline__ void multiply_half(float (&acc)[4], const Vec4& words, u32 scales,
                                              const Block& x) {
    const u32 low = both_low(scales), high = both_high(scales);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 a[4];
        decode_word<MODE>(words.v[j], a);
        a[0] = multiply_pairs<MODE>(a[0], low);
        a[1] = multiply_pairs<MODE>(a[1], high);
        a[2] = multiply_pairs<MODE>(a[2], low);
        a[3] = multiply_pairs<MODE>(a[3], high);
        if (MODE == X_BF16) mma_bf16(acc, a, x.v[2 * j], x.v[2 * j + 1]);
        else mma_f16(acc, a, x.v[2 * j], x.v[2 * j + 1]);
    }
}

// Keeps a value in its register: ptxas would rather compute it again in the loop.
__device__ __forceinline__ void keep(u32& v) { asm volatile("" : "+r"(v)); }

template <int W>
__device__ __forceinline__ void produce(const LinearArgs& p, int tile0, int tile1, int chunks,
                                        u32 base, u32 full, int lane) {
    constexpr u32 kStageBytes = W * kUnitBytes;
    const Producer producer(lane);
    const u8* source = p.weight + (u64)tile0 * p.kblocks * kTileBytes;
    int slot = 0;
    u32 parity = 1;  // the first round finds every stage empty
    for (int tile = tile0; tile < tile1; tile++) {
        for (int chunk = 0; chunk < chunks; chunk++) {
            const u32 bytes = min(2 * W, p.kblocks - chunk * 2 * W) * kTileBytes;
            const u32 barrier = full + 8 * slot;
            barrier_wait(barrier + 8 * p.depth, parity);
            producer.begin(barrier, bytes);
            producer.copy(barrier, base + slot * kStageBytes, source, bytes);
            producer.end(barrier);
            source += bytes;
            if (++slot == p.depth) { slot = 0; parity ^= 1; }
        }
    }
}

template <int MODE, int W>
__device__ __forceinline__ void linear_small(const LinearArgs& p) {
    constexpr u32 kStageBytes = W * kUnitBytes;
    extern __shared__ __align__(128) u8 shared[];
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0);  // uniform, and known to be
    const u32 base = shared_address(shared), full = base + p.depth * kStageBytes;
    float* sums = (float*)(shared + p.depth * (kStageBytes + 16));

    const int chunks = (p.kblocks + 2 * W - 1) / (2 * W);  // stages of one tile
    const int tile0 = (int)((long long)p.tiles * blockIdx.x / gridDim.x);
    const int tile1 = (int)((long long)p.tiles * (blockIdx.x + 1) / gridDim.x);

    if (threadIdx.x == 0) {
        for (int d = 0; d < p.depth; d++) {
            barrier_init(full + 8 * d, kFullArrivals);
            barrier_init(full + 8 * (p.depth + d), W * kWarpArrivals);
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

    // Activations of my two blocks of 128 columns. Lanes without a token keep zeros.
    Block x[2][2] = {};  // [block][half], 16 columns
    const int first_column = 256 * warp;
    const u16* x_first = p.x + (u64)g * p.K + 16 * t + first_column;
    const u16* x_next = x_first;
    const int limit = g < p.M ? p.K - 16 * t : 0;  // columns from here on do not exist for this lane
    int column_next = first_column;
    auto load_x = [&](int k) {
        if (k == 0) {
            load_block_if<0>(x[0][0].v, x_next, column_next, limit);
            load_block_if<128>(x[0][1].v, x_next, column_next + 64, limit);
        } else {
            load_block_if<256>(x[1][0].v, x_next, column_next + 128, limit);
            load_block_if<384>(x[1][1].v, x_next, column_next + 192, limit);
        }
    };
    load_x(0);
    load_x(1);

    u32 words_at = base + warp * kUnitBytes + 16 * lane;
    u32 scales_at = base + warp * kUnitBytes + 1024 + 4 * lane;
    keep(words_at);
    keep(scales_at);
    const float input_scale = p.input_scale ? *p.input_scale : 1.f;
    u32 stage = 0, barrier = full, parity = 0;
    const u32 ring_bytes = p.depth * kStageBytes;
    for (int tile = tile0; tile < tile1; tile++) {
        // Scale and bias of the row that this thread will finish: asked for now, as their latency
        // would stand at the very end of the kernel.
        const int row = tile * 16 + (threadIdx.x & 15);
        float alpha = 0.f, bias = 0.f;
        if (row < p.N) {
            alpha = p.alpha[row];
            if (p.bias) bias = MODE == X_BF16 ? bf16_to_f32(p.bias[row]) : f16_to_f32(p.bias[row]);
        }
        float acc[4] = {};
        auto multiply_block = [&](int k) {
            const u32 at = stage + k * kTileBytes;
            const Vec4 words0 = load_shared_16(words_at + at);
            const Vec4 words1 = load_shared_16(words_at + at + 512);
            const u32 scales = load_shared_4(scales_at + at);
            multiply_half<MODE>(acc, words0, decode_scales<MODE>(scales, 0), x[k][0]);
            multiply_half<MODE>(acc, words1, decode_scales<MODE>(scales, 1), x[k][1]);
        };
        int column = first_column;
        for (int chunk = 0; chunk < chunks; chunk++) {
            const bool last = chunk + 1 == chunks;
            column_next = last ? first_column : column + 256 * W;
            x_next = last ? x_first : x_next + 256 * W;
            barrier_wait(barrier, parity);
            if (column + 256 <= p.K) {
                multiply_block(0);
                load_x(0);
                multiply_block(1);
                load_x(1);
            } else {  // the end of K: columns that do not exist count as zeros
#pragma unroll
                for (int k = 0; k < 2; k++) {
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        if (column + 128 * k + 64 * h >= limit) x[k][h] = Block{};
                    if (column + 128 * k < p.K) multiply_block(k);
                    load_x(k);
                }
            }
            __syncwarp();
            // Behind the loads of this stage, which the multiplications have waited for.
            if (arrives(lane)) barrier_arrive(barrier + 8 * p.depth);
            stage += kStageBytes;
            barrier += 8;
            if (stage == ring_bytes) { stage = 0; barrier = full; parity ^= 1; }
            column = column_next;
        }

        // Sum over the warps: [warp][token][16 rows]; two buffers, so that one barrier a tile is
        // enough. The order is fixed.
        const int outputs = 16 * p.M;
        float* buffer = sums + ((tile - tile0) & 1) * W * outputs;
        float* part = buffer + warp * outputs;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = 2 * t + i;
            if (token < p.M) {
                part[token * 16 + g] = acc[i];
                part[token * 16 + g + 8] = acc[2 + i];
            }
        }
        asm volatile("bar.sync 1, %0;" :: "n"(32 * W) : "memory");  // consumers only
        for (int i = threadIdx.x; i < outputs; i += 32 * W) {
            float sum = 0.f;
#pragma unroll
            for (int w = 0; w < W; w++) sum += buffer[w * outputs + i];
            const float v = fmaf(sum * kDecodeFactor<MODE>, alpha * input_scale, bias);
            if (row < p.N)  // 32 W is a multiple of 16: i & 15 is threadIdx.x & 15
                p.y[(u64)(i / 16) * p.N + row] = MODE == X_BF16 ? f32_to_bf16(v) : f32_to_f16(v);
        }
    }
}
