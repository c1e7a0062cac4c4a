// y[M, N] = alpha * (x[M, K] w[N, K]^T) + bias for many tokens on sm_90a, weights decoded into the
// registers of wgmma.
//
// A unit of work is up to 8 RT row tiles times 8 NT tokens; the CTAs, one on an SM, take units in
// turn. Two warpgroups multiply, a warp of them RT tiles: it streams and decodes its own weights,
// as in linear_medium, while the tensor cores work on what it decoded before. With few units the
// CTAs of a cluster share K and add their sums through distributed shared memory.
//
// Activations come in the order of arrange.cuh, a stage of 64 columns in one copy, which a ninth
// warp issues. (Other warps that arrange them on the way were no faster: docs/log.md.)
//
// Numbers: float32 sums over K in order, within a block, then over the blocks; the grid and the
// size of a unit do not change them.
#pragma once
#include "cluster_sums.cuh"
#include "large_work.cuh"
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

// One warp's own ring of weights, filled ahead over the borders of units. Units in which it has no
// tile are left out.
template <int RT>
struct LargeStream {
    const LargeArgs& p;
    const LargeWork& work;
    const Producer producer;
    const u32 stages, full;
    const int warp;
    int unit, chunk = 0, tiles = 0, slot = 0;
    const u8* source = nullptr;

    __device__ __forceinline__ LargeStream(const LargeArgs& p_, const LargeWork& work_, u32 stages_,
                                            u32 full_, int warp_, int lane)
        : p(p_), work(work_), producer(lane), stages(stages_), full(full_), warp(warp_),
          unit(work_.first - work_.step) {
        if (work.chunk0 == work.chunk1) unit = work.units;  // this block has no part of K
        else next_unit();
    }
    // Starts the copies of the next 256 columns of this warp's tiles, if there are any left.
    __device__ __forceinline__ void copy_next() {
        if (unit >= work.units) return;
        const u32 bytes = min(2, p.kblocks - 2 * chunk) * kTileBytes;
        const u32 barrier = full + 8 * slot;
        producer.begin(barrier, tiles * bytes);
#pragma unroll
        for (int r = 0; r < RT; r++) {
            if (r >= tiles) break;
            const u32 target = stages + (slot * kLargeWarps * RT + r) * kUnitBytes;
            const u8* from = source + (u64)(r * kLargeWarps) * p.kblocks * kTileBytes;
            if (work.token_tiles == 1) producer.copy(barrier, target, from, bytes);
            else if (producer.lane == 0) copy_bulk(target, from, bytes, barrier);  // stays in L2
        }
        if (++slot == p.depth) slot = 0;
        source += kUnitBytes;
        if (++chunk == work.chunk1) next_unit();
    }

private:
    __device__ __forceinline__ void next_unit() {
        do {
            unit += work.step;
            if (unit >= work.units) return;
            const Unit next(p, unit, work.token_tiles);
            tiles = next.tiles_of(warp);
            const u64 first = (u64)(next.tile + warp) * p.kblocks + 2 * work.chunk0;
            source = p.weight + first * kTileBytes;
        } while (tiles == 0);
        chunk = work.chunk0;
    }
};

// What becomes of the sums of a row.
template <int MODE>
struct Epilogue {
    float alpha = 0.f, bias = 0.f;

    __device__ __forceinline__ Epilogue() = default;
    __device__ __forceinline__ Epilogue(const LargeArgs& p, int row) {
        if (row >= p.N) return;
        alpha = p.alpha[row];
        if (p.bias) bias = MODE == X_BF16 ? bf16_to_f32(p.bias[row]) : f16_to_f32(p.bias[row]);
    }
    __device__ __forceinline__ u32 operator()(float sum, float input_scale) const {
        const float v = fmaf(sum * kDecodeFactor<MODE>, alpha * input_scale, bias);
        return MODE == X_BF16 ? f32_to_bf16(v) : f32_to_f16(v);
    }
};

__device__ constexpr u32 kStoreBytes = 1024;  // of shared memory, a warp's

// Writes a warp's tile, 16 tokens at a time by way of shared memory: a lane gets 8 rows of a token,
// so that sectors of 32 bytes are written whole. The two halves of a token change places every four
// tokens, for the banks; two buffers, so that one __syncwarp each is enough.
template <int MODE, int NT>
__device__ __forceinline__ void store_tile(const LargeArgs& p, const float (&acc)[NT][4],
                                           const Epilogue<MODE> (&finish)[2], int row0, int token0,
                                           float input_scale, u32 buffers, int lane) {
    const int from = (lane >> 4) * 8 + (lane & 7), to = lane >> 1;  // of the 16 tokens
    const u32 column = buffers + 32 * from + 16 * ((lane >> 3 ^ from >> 2) & 1);
    const u32 mine = buffers + 32 * to + 16 * ((lane ^ to >> 2) & 1);
    const int row = row0 + 8 * (lane & 1);
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
        u32 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float* sums = acc[n + k / 2] + 2 * (k % 2);
            const Epilogue<MODE>& f = finish[k % 2];
            v[k] = f(sums[0], input_scale) | f(sums[1], input_scale) << 16;
        }
        const u32 buffer = (n / 2 % 2) * (kStoreBytes / 2);
        store_transposed(column + buffer, v[0], v[1], v[2], v[3]);
        __syncwarp();
        const Vec4 rows = load_shared_16(mine + buffer);
        const int token = token0 + 8 * n + to;
        u16* y = p.y + (u64)token * p.N + row;
        if (p.N % 8 == 0) {
            if (token < p.M && row < p.N) store_global_16(y, rows);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (token < p.M && row + i < p.N) y[i] = (u16)(rows.v[i / 2] >> 16 * (i % 2));
        }
    }
}

// linear_large_<dtype>_n<NT>_r<RT>
template <int MODE, int NT, int RT>
__device__ __forceinline__ void linear_large(const LargeArgs& p) {
    static_assert(32 * kLargeWarps == kSumThreads);
    constexpr int kTiles = kLargeWarps * RT;
    constexpr u32 kWeightStage = kTiles * kUnitBytes, kXStage = NT * 1024;
    extern __shared__ __align__(128) u8 shared[];
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0);
    const Cluster cluster;
    const LargeWork work(p, cluster, 8 * NT);

    const u32 x_stages = shared_address(shared), weights = x_stages + p.x_depth * kXStage;
    const u32 full = weights + p.depth * kWeightStage, empty = full + 8 * p.x_depth;
    const u32 weights_full = empty + 8 * p.x_depth;
    const u32 sums_at = (weights_full + 8 * kLargeWarps * p.depth + 127) & ~127u;
    float* sums = (float*)(shared + (sums_at - x_stages));
    if (threadIdx.x == 0) {
        for (int d = 0; d < p.x_depth; d++) {
            barrier_init(full + 8 * d, 1);
            barrier_init(empty + 8 * d, kLargeWarps * kWarpArrivals);
        }
        for (int d = 0; d < kLargeWarps * p.depth; d++) barrier_init(weights_full + 8 * d, 1);
        publish_barriers();
    }
    __syncthreads();
    launch_dependents();
    // Registers of a thread, if they move: of the others, and of those that multiply.
    constexpr bool kMoves = moves_registers(NT, RT);
    if (warp >= kLargeWarps) {
        if (kMoves) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == kLargeWarps) {
            wait_for_previous_kernel();
            copy_x<NT>(p, work, x_stages, full, empty, lane, cluster);
        } else if (cluster.size > 1) {
            for (int u = work.first; u < work.units; u += work.step) {
                cluster.sync();
                cluster.sync();
            }
        }
        return;
    }
    if (kMoves) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const u32 my_full = weights_full + 8 * warp * p.depth;
    const u32 my_weights = weights + warp * RT * kUnitBytes;
    LargeStream<RT> stream(p, work, my_weights, my_full, warp, lane);
    for (int d = 0; d < p.depth; d++) stream.copy_next();
    wait_for_previous_kernel();
    const float input_scale = p.input_scale ? *p.input_scale : 1.f;

    const u64 descriptor = wgmma_descriptor(x_stages);
    int x_slot = 0, slot = 0, previous = -1;
    u32 x_parity = 0, parity = 0;
    for (int u = work.first; u < work.units; u += work.step) {
        const Unit unit(p, u, work.token_tiles);
        const int mine = unit.tiles_of(warp);  // may be 0: its warpgroup multiplies nevertheless
        auto row_of = [&](int r) { return (unit.tile + warp + r * kLargeWarps) * 16; };
        Epilogue<MODE> finish[RT][2];  // asked for now, as their latency would stand at the end
        if (cluster.size == 1) {
#pragma unroll
            for (int r = 0; r < RT; r++) {
                if (r >= mine) break;
                finish[r][0] = Epilogue<MODE>(p, row_of(r) + g);
                finish[r][1] = Epilogue<MODE>(p, row_of(r) + g + 8);
            }
        }
        float acc[RT][NT][4] = {};
        Vec4 words[RT];
        u32 scales[RT];
        auto fetch = [&](int s) {  // what this warp multiplies in stage s
            const u32 at = my_weights + slot * kWeightStage + (s >> 1 & 1) * kTileBytes;
            if (s % 4 == 0 && mine > 0) barrier_wait(my_full + 8 * slot, parity);
#pragma unroll
            for (int r = 0; r < RT; r++) {
                if (r >= mine) break;
                words[r] = load_shared_16(at + r * kUnitBytes + (s & 1) * 512 + 16 * lane);
                if (s % 2 == 0) scales[r] = load_shared_4(at + r * kUnitBytes + 1024 + 4 * lane);
            }
        };
#pragma unroll
        for (int r = 0; r < RT; r++) { words[r] = Vec4{}; scales[r] = 0; }
        if (work.stages > 0) fetch(0);
        for (int s = 0; s < work.stages; s++) {
            u32 pair[RT];
#pragma unroll
            for (int r = 0; r < RT; r++)
                pair[r] = s & 1 ? decode_scales<MODE>(scales[r], 1)
                                : decode_scales<MODE>(scales[r], 0);
            const u64 b = descriptor + (u64)(x_slot * (kXStage >> 4));
            u32 a[2][RT][4];  // one is multiplied while the other is decoded
#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int r = 0; r < RT; r++) {
                    u32 (&d)[4] = a[j & 1][r];
                    const u32 low = both_low(pair[r]), high = both_high(pair[r]);
                    decode_word<MODE>(words[r].v[j], d);
                    d[0] = multiply_pairs<MODE>(d[0], low);
                    d[1] = multiply_pairs<MODE>(d[1], high);
                    d[2] = multiply_pairs<MODE>(d[2], low);
                    d[3] = multiply_pairs<MODE>(d[3], high);
                }
                if (j == 0) barrier_wait(full + 8 * x_slot, x_parity);
                wgmma_fence();
#pragma unroll
                for (int r = 0; r < RT; r++) {
                    if (MODE == X_BF16) Wgmma<NT>::bf16(acc[r], a[j & 1][r], b + j * (256 >> 4));
                    else Wgmma<NT>::f16(acc[r], a[j & 1][r], b + j * (256 >> 4));
                }
                wgmma_commit();
                if (j == 3) {
                    const bool last = s % 4 == 3 || s + 1 == work.stages;  // of the ring's stage
                    if (mine > 0 && last) {
                        if (++slot == p.depth) { slot = 0; parity ^= 1; }
                        __syncwarp();  // all lanes have decoded what is copied over
                        stream.copy_next();
                    }
                    if (s + 1 < work.stages) fetch(s + 1);
                }
                wgmma_wait<1>();
                // All of the stage before has been multiplied.
                if (j == 0 && previous >= 0 && arrives(lane)) barrier_arrive(empty + 8 * previous);
            }
            previous = x_slot;
            if (++x_slot == p.x_depth) { x_slot = 0; x_parity ^= 1; }
        }
        wgmma_wait<0>();
        if (previous >= 0 && arrives(lane)) barrier_arrive(empty + 8 * previous);
        previous = -1;
        const int token0 = unit.token_tile * 8 * NT;
        if (cluster.size == 1) {
#pragma unroll
            for (int r = 0; r < RT; r++) {
                if (r >= mine) break;
                store_tile<MODE, NT>(p, acc[r], finish[r], row_of(r), token0, input_scale,
                                     sums_at + warp * kStoreBytes, lane);
            }
            continue;
        }
        const int tokens = min(8 * NT, p.M - token0);
        SumsFinish<MODE, kTiles> finish_shared(p, unit.tile, unit.tiles);
        finish_shared.fetch(p);
#pragma unroll
        for (int r = 0; r < RT; r++) {
            if (r >= mine) break;
            keep_sums<NT, kTiles>(sums + 16 * (warp + r * kLargeWarps), acc[r], tokens, lane);
        }
        cluster.sync();
        finish_shared(p, cluster, sums_at, token0, tokens, input_scale);
        cluster.sync();  // before they are overwritten, or my shared memory is gone
    }
}
