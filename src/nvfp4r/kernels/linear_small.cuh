// y[M, N] = alpha * (x[M, K] w[N, K]^T) + bias for M <= 16, weights read once (design D1).
//
// Work: a cluster of `splits` CTAs owns a contiguous range of row tiles (16 rows each); its CTAs
// share K; within a CTA, warp (wn, wk) takes every row tile of its turn wn and slice wk of K. A warp
// holds the activations of one unit (UK x 128 columns) in registers and streams RT tiles past them
// from its own ring, so there is no barrier until a pass of RT tiles per warp is summed.
//
// Numbers: products of code, block scale and activation are exact in the tensor core; sums are
// float32 in an order that depends on the plan alone, never on M. alpha is applied in float32.
#pragma once
#include "activations.cuh"
#include "decode.cuh"
#include "ring.cuh"

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
    int splits;                // CTAs of a cluster, which share K
    int warps_k;               // warps of a CTA that share K
    int warps_n;               // and those that share row tiles
    int depth;                 // stages of each warp's ring
    int y_is_bf16;
};

__device__ constexpr int kTileBytes = 1152;  // 16 rows x 128 columns: 2 x 512 codes, 128 scales

__device__ __forceinline__ void store_output(const LinearArgs& p, int token, int row, float sum) {
    if (row >= p.N) return;
    float alpha = p.alpha[row];
    if (p.input_scale) alpha *= *p.input_scale;
    float v = sum * kDecodeFactor * alpha;
    if (p.bias) v += p.y_is_bf16 ? bf16_to_f32(p.bias[row]) : f16_to_f32(p.bias[row]);
    p.y[(u64)token * p.N + row] = p.y_is_bf16 ? f32_to_bf16(v) : f32_to_f16(v);
}

// One 16 x 64 half tile: 4 words and 2 scales a lane, NT x 8 tokens.
template <int NT>
__device__ __forceinline__ void multiply_half(float (&acc)[NT][4], const Vec4& words, u32 scales,
                                              const u32 (&x)[NT][8]) {
    const u32 pair = decode_scales(scales), low = both_low(pair), high = both_high(pair);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 a[4];
        decode_word(words.v[j], a);
        a[0] = mul_f16x2(a[0], low);
        a[1] = mul_f16x2(a[1], high);
        a[2] = mul_f16x2(a[2], low);
        a[3] = mul_f16x2(a[3], high);
#pragma unroll
        for (int n = 0; n < NT; n++) mma_m16n8k16(acc[n], a, x[n][2 * j], x[n][2 * j + 1]);
    }
}

template <int MODE, int NT, int RT>
__device__ __forceinline__ void linear_small(const LinearArgs& p) {
    constexpr int UK = NT == 1 ? 2 : 1;  // tiles of 128 columns whose activations fit in registers
    extern __shared__ __align__(128) u8 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int warps = p.warps_k * p.warps_n;
    const int wn = warp / p.warps_k, wk = warp - wn * p.warps_k;
    const int rank = p.splits == 1 ? 0 : (int)cluster_rank();
    const int group = (int)blockIdx.x / p.splits, groups = (int)gridDim.x / p.splits;

    // Shared memory: rings, their barriers, then two buffers of partial sums.
    const u32 base = shared_address(shared);
    const u32 ring_bytes = (u32)p.depth * UK * kTileBytes;
    const u32 barriers = base + warps * ring_bytes;
    const int slots = p.warps_n * RT, outputs = slots * 16 * p.M;  // of one pass
    float* sums = (float*)(shared + (warps * (ring_bytes + 8 * p.depth) + 15) / 16 * 16);
    Ring ring;
    ring.init(base + warp * ring_bytes, barriers + 8 * warp * p.depth, UK * kTileBytes, p.depth,
              lane);

    // My units of K and the cluster's row tiles.
    const int units = (p.kblocks + UK - 1) / UK, slices = p.splits * p.warps_k;
    const int slice = rank * p.warps_k + wk;
    const int unit0 = (int)((long long)units * slice / slices);
    const int unit1 = (int)((long long)units * (slice + 1) / slices);
    const int tile0 = (int)((long long)p.tiles * group / groups);
    const int tile1 = (int)((long long)p.tiles * (group + 1) / groups);
    const int passes = (tile1 - tile0 + slots - 1) / slots;

    // Stages in the order of use: pass, unit, tile. The filling side runs `depth` stages ahead.
    int fill_pass = 0, fill_unit = unit0, fill_r = 0;
    auto fill = [&]() {
        while (true) {  // skip tiles beyond the end
            if (fill_pass >= passes || unit0 == unit1) { ring.fill_nothing(); return; }
            const int tile = tile0 + fill_pass * slots + wn * RT + fill_r;
            const bool exists = tile < tile1;
            const int block = fill_unit * UK;
            const int count = min(UK, p.kblocks - block);
            if (exists)
                ring.fill(p.weight + ((u64)tile * p.kblocks + block) * kTileBytes,
                          count * kTileBytes, lane);
            if (++fill_r == RT) {
                fill_r = 0;
                if (++fill_unit == unit1) { fill_unit = unit0; fill_pass++; }
            }
            if (exists) return;
        }
    };
    for (int d = 0; d < p.depth; d++) fill();  // weights do not depend on the kernel before
    launch_dependents();
    wait_for_previous_kernel();

    const float input_scale = is_quantised(MODE) ? *p.input_scale : 0.f;
    Activations<MODE, 2 * UK> x[NT];
    for (int pass = 0; pass < passes; pass++) {
        float acc[RT][NT][4] = {};
        const int first = tile0 + pass * slots + wn * RT;
        for (int unit = unit0; unit < unit1; unit++) {
            if (pass == 0 || unit1 - unit0 > 1) {  // a single unit stays in registers
#pragma unroll
                for (int n = 0; n < NT; n++)
                    x[n].load(p.x, g + 8 * n, p.M, p.K, unit * UK * 128, lane, input_scale);
            }
            const bool whole = UK == 1 || (unit + 1) * UK <= p.kblocks;
#pragma unroll
            for (int r = 0; r < RT; r++) {
                if (first + r >= tile1) break;
                const u32 stage = ring.wait();
                Vec4 words[2 * UK];
                u32 scales[UK];
#pragma unroll
                for (int k = 0; k < UK; k++) {
                    if (k == 0 || whole) {
                        words[2 * k] = load_shared_16(stage + k * kTileBytes + 16 * lane);
                        words[2 * k + 1] = load_shared_16(stage + k * kTileBytes + 512 + 16 * lane);
                        scales[k] = load_shared_4(stage + k * kTileBytes + 1024 + 4 * lane);
                    }
                }
                __syncwarp();
                ring.advance();
                fill();
                float part[NT][4] = {};
                float (&target)[NT][4] = MODE == X_BF16 ? part : acc[r];
#pragma unroll
                for (int k = 0; k < UK; k++) {
                    if (k == 0 || whole) {
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            u32 pairs[NT][8];
#pragma unroll
                            for (int n = 0; n < NT; n++)
#pragma unroll
                                for (int i = 0; i < 8; i++) pairs[n][i] = x[n].pairs[2 * k + h][i];
                            multiply_half<NT>(target, words[2 * k + h],
                                              h == 0 ? scales[k] : scales[k] >> 16, pairs);
                        }
                    }
                }
                if (MODE == X_BF16) {
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        acc[r][n][0] = fmaf(part[n][0], x[n].factor[0], acc[r][n][0]);
                        acc[r][n][1] = fmaf(part[n][1], x[n].factor[1], acc[r][n][1]);
                        acc[r][n][2] = fmaf(part[n][2], x[n].factor[0], acc[r][n][2]);
                        acc[r][n][3] = fmaf(part[n][3], x[n].factor[1], acc[r][n][3]);
                    }
                }
            }
        }

        // Sum over the warps of K. Layout [slot][wk][token][16 rows]; two buffers, so that one
        // barrier a pass is enough.
        float* buffer = sums + (pass & 1) * outputs * p.warps_k;
#pragma unroll
        for (int r = 0; r < RT; r++) {
            float* mine = buffer + ((wn * RT + r) * p.warps_k + wk) * 16 * p.M;
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const int token = 8 * n + 2 * t;
                if (token < p.M) {
                    mine[token * 16 + g] = acc[r][n][0];
                    mine[token * 16 + g + 8] = acc[r][n][2];
                }
                if (token + 1 < p.M) {
                    mine[(token + 1) * 16 + g] = acc[r][n][1];
                    mine[(token + 1) * 16 + g + 8] = acc[r][n][3];
                }
            }
        }
        __syncthreads();
        const int row0 = (tile0 + pass * slots) * 16, per_slot = 16 * p.M;
        for (int i = threadIdx.x; i < outputs; i += blockDim.x) {
            const int slot = i / per_slot, o = i - slot * per_slot;
            float* column = buffer + slot * p.warps_k * per_slot + o;
            float sum = 0.f;
            for (int k = 0; k < p.warps_k; k++) sum += column[k * per_slot];
            if (p.splits > 1) {
                column[0] = sum;
            } else if (tile0 + pass * slots + slot < tile1) {
                store_output(p, o / 16, row0 + slot * 16 + (o & 15), sum);
            }
        }
        if (p.splits > 1) {
            cluster_barrier();
            const int from = outputs * rank / p.splits, to = outputs * (rank + 1) / p.splits;
            for (int i = from + threadIdx.x; i < to; i += blockDim.x) {
                const int slot = i / per_slot, o = i - slot * per_slot;
                const u32 address = shared_address(buffer + slot * p.warps_k * per_slot + o);
                float sum = 0.f;
                for (int k = 0; k < p.splits; k++) sum += load_cluster_f32(address, k);
                if (tile0 + pass * slots + slot < tile1)
                    store_output(p, o / 16, row0 + slot * 16 + (o & 15), sum);
            }
        }
    }
    if (p.splits > 1) cluster_barrier();  // no CTA leaves while another may read its sums
}
