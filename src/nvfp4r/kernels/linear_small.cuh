// y[M, N] = alpha * (x[M, K] w[N, K]^T) + bias for M <= 16, weights read once.
//
// A CTA walks over groups of RT row tiles (16 rows each). Its W consumer warps share K: in a stage,
// warp w takes 256 columns of its own, so that the stage is contiguous in memory. A producer warp
// keeps a ring of stages full by bulk copies; it never waits for the kernel before, as weights do
// not depend on it. The sums of the W warps meet in shared memory once per tile group.
//
// Numbers: products of code, block scale and activation are exact in the tensor core; sums are
// float32 in an order that depends on the plan alone, never on M. alpha is applied in float32.
#pragma once
#include "decode.cuh"

struct LinearArgs {
    const u8* weight;          // [tiles][kblocks][1152] (docs/layout.md)
    const u16* x;              // [M, K] fp16 or bf16
    u16* y;                    // [M, N] fp16 or bf16
    const float* alpha;        // [N]
    const u16* bias;           // [N] in y's dtype, or null
    const float* input_scale;  // [] for quantised activations, or null
    int M, N, K;
    int tiles;                 // ceil(N / 16)
    int kblocks;               // ceil(K / 128)
    int depth;                 // stages of the ring
    int y_is_bf16;
};

__device__ constexpr int kTileBytes = 1152;  // 16 rows x 128 columns: 2 x 512 codes, 128 scales
__device__ constexpr int kUnitBytes = 2 * kTileBytes;

template <int MODE>
__device__ __forceinline__ void store_output(const LinearArgs& p, int token, int row, float sum) {
    if (row >= p.N) return;
    float alpha = p.alpha[row];
    if (p.input_scale) alpha *= *p.input_scale;
    float v = sum * kDecodeFactor<MODE> * alpha;
    if (p.bias) v += p.y_is_bf16 ? bf16_to_f32(p.bias[row]) : f16_to_f32(p.bias[row]);
    p.y[(u64)token * p.N + row] = p.y_is_bf16 ? f32_to_bf16(v) : f32_to_f16(v);
}

// One 16 x 64 half tile: 4 words and 2 scales a lane, NT x 8 tokens.
template <int MODE, int NT>
__device__ __forceinline__ void multiply_half(float (&acc)[NT][4], const Vec4& words, u32 scales,
                                              const Vec4 (&x)[NT][2]) {
    const u32 low = both_low(scales), high = both_high(scales);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 a[4];
        decode_word<MODE>(words.v[j], a);
        a[0] = multiply_pairs<MODE>(a[0], low);
        a[1] = multiply_pairs<MODE>(a[1], high);
        a[2] = multiply_pairs<MODE>(a[2], low);
        a[3] = multiply_pairs<MODE>(a[3], high);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const u32 b0 = x[n][j / 2].v[2 * (j & 1)], b1 = x[n][j / 2].v[2 * (j & 1) + 1];
            if (MODE == X_BF16) mma_bf16(acc[n], a, b0, b1);
            else mma_f16(acc[n], a, b0, b1);
        }
    }
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{\n.reg .pred done;\n"
                 "WAIT:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra DONE;\n"
                 "bra WAIT;\n"
                 "DONE:\n}" :: "r"(barrier), "r"(parity) : "memory");
}

template <int MODE, int NT, int RT>
__device__ __forceinline__ void linear_small(const LinearArgs& p) {
    extern __shared__ __align__(128) u8 shared[];
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0);  // uniform, and known to be
    const int W = (int)(blockDim.x >> 5) - 1;                        // consumers
    const u32 stage_bytes = RT * W * kUnitBytes;
    const u32 base = shared_address(shared), full = base + p.depth * stage_bytes;
    const u32 empty = full + 8 * p.depth;
    float* sums = (float*)(shared + p.depth * (stage_bytes + 16));

    const int chunks = (p.kblocks + 2 * W - 1) / (2 * W);  // stages of one tile group
    const int tile_groups = (p.tiles + RT - 1) / RT;
    const int group0 = (int)((long long)tile_groups * blockIdx.x / gridDim.x);
    const int group1 = (int)((long long)tile_groups * (blockIdx.x + 1) / gridDim.x);

    if (threadIdx.x == 0) {
        for (int d = 0; d < p.depth; d++) {
            barrier_init(full + 8 * d, 1);
            barrier_init(empty + 8 * d, W);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    launch_dependents();

    if (warp == W) {  // producer
        if (lane == 0) {
            u64 policy;
            asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
            const u64 tile_bytes = (u64)p.kblocks * kTileBytes;
            int slot = 0;
            u32 parity = 1;  // the first round finds every stage empty
            for (int group = group0; group < group1; group++) {
                const u8* source = p.weight + (u64)group * RT * tile_bytes;
                const int tiles = min(RT, p.tiles - group * RT);
                for (int chunk = 0; chunk < chunks; chunk++) {
                    const u32 bytes = min(2 * W, p.kblocks - chunk * 2 * W) * kTileBytes;
                    barrier_wait(empty + 8 * slot, parity);
                    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                                 :: "r"(full + 8 * slot), "r"(bytes * tiles) : "memory");
#pragma unroll
                    for (int r = 0; r < RT; r++) {
                        if (r < tiles)
                            asm volatile(
                                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                                ".L2::cache_hint [%0], [%1], %2, [%3], %4;"
                                :: "r"(base + slot * stage_bytes + r * W * kUnitBytes),
                                   "l"(source + r * tile_bytes), "r"(bytes),
                                   "r"(full + 8 * slot), "l"(policy) : "memory");
                    }
                    source += W * kUnitBytes;
                    if (++slot == p.depth) { slot = 0; parity ^= 1; }
                }
            }
        }
        return;
    }

    wait_for_previous_kernel();
    int slot = 0;
    u32 parity = 0;
    // Activations of my two blocks of 128 columns; each is loaded again for the next stage as soon
    // as it has been used. Lanes without a token keep zeros.
    Vec4 x[2][2][NT][2] = {};
    const u16* x_lane[NT];
    int limit[NT];  // columns from here on do not exist for this lane
#pragma unroll
    for (int n = 0; n < NT; n++) {
        x_lane[n] = p.x + (u64)(g + 8 * n) * p.K + 16 * t;
        limit[n] = g + 8 * n < p.M ? p.K - 16 * t : 0;
    }
    const bool ragged = p.K % 128 != 0;
    auto load_x = [&](int k, int block) {
        const int column = block * 128;
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const u16* source = x_lane[n] + column;
            load_global_32_if<0>(x[k][0][n][0], x[k][0][n][1], source, column, limit[n]);
            load_global_32_if<128>(x[k][1][n][0], x[k][1][n][1], source, column + 64, limit[n]);
            if (ragged && block == p.kblocks - 1) {
#pragma unroll
                for (int h = 0; h < 2; h++)
                    if (column + 64 * h >= limit[n]) x[k][h][n][0] = x[k][h][n][1] = Vec4{};
            }
        }
    };
    const int first_block = 2 * warp;
    load_x(0, first_block);
    load_x(1, first_block + 1);
    for (int group = group0; group < group1; group++) {
        float acc[RT][NT][4] = {};
        int block = first_block;
        for (int chunk = 0; chunk < chunks; chunk++) {
            const u32 mine = base + slot * stage_bytes + warp * kUnitBytes;
            const int next = chunk + 1 == chunks ? first_block : block + 2 * W;
            barrier_wait(full + 8 * slot, parity);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                if (block + k < p.kblocks) {
#pragma unroll
                    for (int r = 0; r < RT; r++) {
                        const u32 tile = mine + r * W * kUnitBytes + k * kTileBytes;
                        const Vec4 words0 = load_shared_16(tile + 16 * lane);
                        const Vec4 words1 = load_shared_16(tile + 512 + 16 * lane);
                        const u32 scales = load_shared_4(tile + 1024 + 4 * lane);
                        multiply_half<MODE, NT>(acc[r], words0, decode_scales<MODE>(scales, 0),
                                                x[k][0]);
                        multiply_half<MODE, NT>(acc[r], words1, decode_scales<MODE>(scales, 1),
                                                x[k][1]);
                    }
                }
                load_x(k, next + k);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * slot);
            if (++slot == p.depth) { slot = 0; parity ^= 1; }
            block = next;
        }

        // Sum over the warps. Layout [tile][warp][token][16 rows]; two buffers, so that one
        // barrier a group is enough.
        const int per_tile = 16 * p.M;
        float* buffer = sums + ((group - group0) & 1) * RT * W * per_tile;
#pragma unroll
        for (int r = 0; r < RT; r++) {
            float* part = buffer + (r * W + warp) * per_tile;
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const int token = 8 * n + 2 * t;
                if (token < p.M) {
                    part[token * 16 + g] = acc[r][n][0];
                    part[token * 16 + g + 8] = acc[r][n][2];
                }
                if (token + 1 < p.M) {
                    part[(token + 1) * 16 + g] = acc[r][n][1];
                    part[(token + 1) * 16 + g + 8] = acc[r][n][3];
                }
            }
        }
        asm volatile("bar.sync 1, %0;" :: "r"(32 * W) : "memory");
        for (int i = threadIdx.x; i < RT * per_tile; i += 32 * W) {
            const int r = i / per_tile, o = i - r * per_tile;
            const float* column = buffer + r * W * per_tile + o;
            float sum = 0.f;
            for (int w = 0; w < W; w++) sum += column[w * per_tile];
            store_output<MODE>(p, o / 16, (group * RT + r) * 16 + (o & 15), sum);
        }
    }
}
