// Sums that the blocks of a cluster have parts of: kept in shared memory, added over the blocks,
// finished and written. Every block finishes some of the tokens; a thread four rows at a time, with
// eight loads on their way, as a load from another block takes some 200 cycles.
//
// A block keeps its parts as [token][tile][16 rows], floats. A token takes 4 more than its tiles, so
// that neither the lanes that keep nor those that add meet in a bank.
#pragma once
#include "cluster.cuh"
#include "decode.cuh"
#include "linear_args.cuh"

template <int TILES>
__device__ constexpr int kTokenSums = 16 * TILES + 4;
__device__ constexpr int kSumThreads = 256;  // of a block: those that have multiplied

// A warp's accumulators of one tile; `part` is that tile's place at the first token.
template <int NT, int TILES>
__device__ __forceinline__ void keep_sums(float* part, const float (&acc)[NT][4], int tokens,
                                          int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = 8 * n + 2 * t + i;
            if (token >= tokens) continue;
            part[token * kTokenSums<TILES> + g] = acc[n][i];
            part[token * kTokenSums<TILES> + g + 8] = acc[n][2 + i];
        }
    }
}

// What a thread finishes: four rows of every kStep-th token.
template <int MODE, int TILES>
struct SumsFinish {
    static constexpr int kQuads = 4 * TILES, kStep = kSumThreads / kQuads;
    const int quad = (int)threadIdx.x % kQuads;
    int row;
    float alpha[4] = {}, bias[4] = {};

    // Of `tiles` tiles from `tile` on.
    template <class Args>
    __device__ __forceinline__ SumsFinish(const Args& p, int tile, int tiles)
        : row(quad < 4 * tiles && (int)threadIdx.x < kQuads * kStep ? 16 * tile + 4 * quad : p.N) {
    }

    template <class Args>
    __device__ __forceinline__ void prefetch(const Args& p) const {
        if (row < p.N) prefetch_to_l2(p.alpha + row);
    }

    // Asks for alpha and bias: behind the multiplication, as they take eight registers.
    template <class Args>
    __device__ __forceinline__ void fetch(const Args& p) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (row + i >= p.N) break;
            alpha[i] = p.alpha[row + i];
            if (p.bias) {
                const u16 b = p.bias[row + i];
                bias[i] = MODE == X_BF16 ? bf16_to_f32(b) : f16_to_f32(b);
            }
        }
    }

    // Adds and writes this block's share of `tokens` tokens; the first is `token0` of y. Between two
    // barriers of the cluster.
    template <class Args>
    __device__ __forceinline__ void operator()(const Args& p, const Cluster& cluster, u32 sums_at,
                                               int token0, int tokens, float input_scale) {
        if (row >= p.N) return;
#pragma unroll
        for (int i = 0; i < 4; i++) alpha[i] *= input_scale;
        const int first = tokens * (int)cluster.rank / (int)cluster.size;
        const int last = tokens * (int)(cluster.rank + 1) / (int)cluster.size;
        const u32 at = sums_at + 16 * quad;
        if (cluster.size == 1) add<1>(p, cluster, at, token0, first, last);
        else if (cluster.size == 2) add<2>(p, cluster, at, token0, first, last);
        else if (cluster.size == 4) add<4>(p, cluster, at, token0, first, last);
        else add<8>(p, cluster, at, token0, first, last);
    }

private:
    template <int SIZE, class Args>
    __device__ __forceinline__ void add(const Args& p, const Cluster& cluster, u32 at, int token0,
                                        int first, int last) const {
        constexpr int kAtOnce = SIZE == 1 ? 4 : 8 / SIZE;  // tokens
        u32 from[SIZE];
#pragma unroll
        for (int r = 0; r < SIZE; r++) from[r] = cluster.map(at, r);
        for (int token = first + (int)threadIdx.x / kQuads; token < last;
             token += kAtOnce * kStep) {
            Vec4 part[kAtOnce][SIZE];
#pragma unroll
            for (int k = 0; k < kAtOnce; k++) {
                const u32 offset = 4 * kTokenSums<TILES> * min(token + k * kStep, last - 1);
#pragma unroll
                for (int r = 0; r < SIZE; r++) part[k][r] = load_cluster_16(from[r] + offset);
            }
#pragma unroll
            for (int k = 0; k < kAtOnce; k++) {
                if (token + k * kStep >= last) break;
                u32 y[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float sum = 0.f;
#pragma unroll
                    for (int r = 0; r < SIZE; r++) sum += __uint_as_float(part[k][r].v[i]);
                    const float v = fmaf(sum * kDecodeFactor<MODE>, alpha[i], bias[i]);
                    y[i] = MODE == X_BF16 ? f32_to_bf16(v) : f32_to_f16(v);
                }
                store(p, token0 + token + k * kStep, y);
            }
        }
    }

    template <class Args>
    __device__ __forceinline__ void store(const Args& p, int token, const u32 (&y)[4]) const {
        u16* target = p.y + (u64)token * p.N + row;
        if (p.N % 4 == 0) {
            store_global_8(target, y[0] | y[1] << 16, y[2] | y[3] << 16);
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (row + i < p.N) target[i] = (u16)y[i];
    }
};
