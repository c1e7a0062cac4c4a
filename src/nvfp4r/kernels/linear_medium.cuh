// y[M, N] = alpha * (x[M, K] w[N, K]^T) + bias for 9 to 64 tokens, every weight read once.
//
// With many tokens the activations are what has to be saved: a CTA takes eight or sixteen row tiles
// at a time, one or two a warp, and all of them use one copy of x in shared memory. Where that
// leaves too few CTAs, the blocks of a cluster share K and add their sums through distributed shared
// memory.
//
// Each warp streams its own weights through a ring that it keeps full by itself, starting before the
// kernel before has ended; two more warps copy x for all.
//
// Numbers: as linear_small; a sum runs over K in order within a block, then over the blocks.
#pragma once
#include "cluster_sums.cuh"
#include "linear_args.cuh"
#include "quantize.cuh"
#include "stages.cuh"

__device__ constexpr int kMediumWarps = 8;
__device__ constexpr int kXWarps = 2;
// A token's 256 columns in a stage of x. 16 bytes more than they take: the 8 lanes that load together
// then hit different banks.
__device__ constexpr u32 kTokenBytes = 2 * 256 + 16;

struct MediumWork {
    int tile0, tile1;    // row tiles of this cluster
    int passes;          // over K, for as many tiles as the warps hold at once
    int chunk0, chunk1;  // of 256 columns: this block's share of K

    __device__ __forceinline__ MediumWork(const LinearArgs& p, const Cluster& cluster,
                                          int tiles_at_once) {
        const int group = blockIdx.x / cluster.size, groups = gridDim.x / cluster.size;
        tile0 = (int)((long long)p.tiles * group / groups);
        tile1 = (int)((long long)p.tiles * (group + 1) / groups);
        passes = (tile1 - tile0 + tiles_at_once - 1) / tiles_at_once;
        const int chunks = (p.kblocks + 1) / 2;
        chunk0 = chunks * (int)cluster.rank / (int)cluster.size;
        chunk1 = chunks * (int)(cluster.rank + 1) / (int)cluster.size;
    }
    // How many tiles of a pass are a warp's: its number, and 8 further, so that the warps and the
    // tensor cores have equal shares.
    __device__ __forceinline__ int tiles_of(int pass, int warp) const {
        const int after = first(pass + 1) - first(pass) - warp;
        return after <= 0 ? 0 : (after + kMediumWarps - 1) / kMediumWarps;
    }
    // First tile of a pass; passes are as equal as they can be.
    __device__ __forceinline__ int first(int pass) const {
        return tile0 + (tile1 - tile0) * pass / passes;
    }
};

// Place in a ring of stages; `parity` is that of the phase to wait for.
struct Place {
    int slot = 0;
    u32 parity = 0;

    __device__ __forceinline__ void next(int depth) {
        if (++slot == depth) { slot = 0; parity ^= 1; }
    }
};

// Puts x into the ring, 256 columns a stage; every producer takes a part of each. Plain asynchronous
// copies: a bulk copy a token would take 100 cycles each. x is taken as it is: preparing it here took
// two warps two to four times as long as the multiplications (benchmarks/prologue.py).
__device__ __forceinline__ void produce_activations(const LinearArgs& p, const MediumWork& work,
                                                    const Cluster& cluster, u32 stage0,
                                                    u32 stage_bytes, u32 full, u32 empty,
                                                    int thread) {
    const int first = thread >> 5, lane = thread & 31;
    wait_for_previous_kernel();
    Place place{0, 1};  // the first round finds every stage empty
    for (int pass = 0; pass < work.passes; pass++) {
        for (int chunk = work.chunk0; chunk < work.chunk1; chunk++) {
            const int column = chunk * 256 + 8 * lane;
            barrier_wait(empty + 8 * place.slot, place.parity);
            if (column < p.K) {
                u32 target = stage0 + place.slot * stage_bytes + first * kTokenBytes + 16 * lane;
                const u16* source = p.x + (u64)first * p.K + column;
#pragma unroll 4
                for (int token = first; token < p.M; token += kXWarps) {
                    copy_async_16(target, source);
                    target += kXWarps * kTokenBytes;
                    source += kXWarps * p.K;
                }
            }
            arrive_after_copies(full + 8 * place.slot);
            place.next(p.x_depth);
        }
        if (cluster.size > 1) {  // the two of the consumers
            cluster.sync();
            cluster.sync();
        }
    }
}

// The weights of one warp: its RT row tiles of each pass, 256 columns a stage, in a ring of its own
// that it fills by itself, `depth` stages ahead.
template <int RT>
struct WeightStream {
    const LinearArgs& p;
    const MediumWork& work;
    const Producer producer;
    const u32 stage0, stage_bytes, full;
    const int warp;
    int pass = -1, chunk = 0, tiles = 0;  // of the next copy
    const u8* source = nullptr;
    Place place;

    __device__ __forceinline__ WeightStream(const LinearArgs& p_, const MediumWork& work_,
                                            u32 stage0_, u32 stage_bytes_, u32 full_, int warp_,
                                            int lane)
        : p(p_), work(work_), producer(lane), stage0(stage0_), stage_bytes(stage_bytes_),
          full(full_), warp(warp_) {
        if (work.chunk0 == work.chunk1) pass = work.passes;
        else next_pass();
    }
    // Start the next copy, if there is one left.
    __device__ __forceinline__ void copy_next() {
        if (pass >= work.passes) return;
        const u32 bytes = min(2, p.kblocks - 2 * chunk) * kTileBytes;
        const u32 barrier = full + 8 * place.slot;
        producer.begin(barrier, tiles * bytes);
#pragma unroll
        for (int r = 0; r < RT; r++)
            if (r < tiles)
                producer.copy(barrier, stage0 + place.slot * stage_bytes + r * kUnitBytes,
                              source + (u64)(r * kMediumWarps) * p.kblocks * kTileBytes, bytes);
        producer.end(barrier);
        place.next(p.depth);
        source += kUnitBytes;
        if (++chunk == work.chunk1) next_pass();
    }

private:
    // The next pass that has a tile for this warp.
    __device__ __forceinline__ void next_pass() {
        int tile;
        do {
            if (++pass >= work.passes) return;
            tile = work.first(pass) + warp;
            tiles = work.tiles_of(pass, warp);
        } while (tiles == 0);
        chunk = work.chunk0;
        source = p.weight + ((u64)tile * p.kblocks + 2 * chunk) * kTileBytes;
    }
};

// 8 columns of each lane for NT x 8 tokens; beyond K, where not `valid`, they count as zeros.
template <int NT>
__device__ __forceinline__ void load_x(Vec4 (&x)[NT], u32 x_at, bool valid) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
        x[n] = load_shared_16(x_at + n * 8 * kTokenBytes);
        if (!valid) x[n] = Vec4{};
    }
}

// One block of 128 columns of the first R of up to RT row tiles. `left` is how many of the columns
// exist.
template <int MODE, int NT, int R, int RT>
__device__ __forceinline__ void multiply_block(float (&acc)[RT][NT][4], u32 words_at,
                                               u32 scales_at, u32 x_at, int left, int t) {
    Vec4 x[2][NT];  // of this quarter of the block and the next
    load_x<NT>(x[0], x_at, 16 * t < left);
    u32 scales[R];
#pragma unroll
    for (int r = 0; r < R; r++) scales[r] = load_shared_4(scales_at + r * kUnitBytes);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        Vec4 words[R];
        u32 pair[R];
#pragma unroll
        for (int r = 0; r < R; r++) {
            words[r] = load_shared_16(words_at + r * kUnitBytes + 512 * h);
            pair[r] = decode_scales<MODE>(scales[r], h);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int next = 2 * h + half + 1;
            if (next < 4)
                load_x<NT>(x[next & 1], x_at + 128 * (next / 2) + 16 * (next & 1),
                           64 * (next / 2) + 16 * t < left);
#pragma unroll
            for (int j = 0; j < 2; j++) {
#pragma unroll
                for (int r = 0; r < R; r++) {
                    const u32 low = both_low(pair[r]), high = both_high(pair[r]);
                    u32 a[4];
                    decode_word<MODE>(words[r].v[2 * half + j], a);
                    a[0] = multiply_pairs<MODE>(a[0], low);
                    a[1] = multiply_pairs<MODE>(a[1], high);
                    a[2] = multiply_pairs<MODE>(a[2], low);
                    a[3] = multiply_pairs<MODE>(a[3], high);
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        const u32 b0 = x[half][n].v[2 * j], b1 = x[half][n].v[2 * j + 1];
                        if (MODE == X_BF16) mma_bf16(acc[r][n], a, b0, b1);
                        else mma_f16(acc[r][n], a, b0, b1);
                    }
                }
            }
        }
    }
}

__device__ __forceinline__ void consumers_sync() {
    asm volatile("bar.sync 1, %0;" :: "n"(32 * kMediumWarps) : "memory");
}

template <int MODE, int NT, int RT>
__device__ __forceinline__ void linear_medium(const LinearArgs& p) {
    static_assert(32 * kMediumWarps == kSumThreads);
    constexpr int kTiles = RT * kMediumWarps;
    constexpr u32 kWeightBytes = kTiles * kUnitBytes, kXBytes = 8 * NT * kTokenBytes;
    extern __shared__ __align__(128) u8 shared[];
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0);
    const Cluster cluster;
    const MediumWork work(p, cluster, kTiles);

    // Stages of weights and of x; sums; barriers: x full and x empty of each stage, weights full of
    // each warp and stage, and one a warp: its stage has been read.
    const int x_depth = p.x_depth;
    const u32 weights_at = shared_address(shared), x_stages = weights_at + p.depth * kWeightBytes;
    const u32 sums_at = x_stages + x_depth * kXBytes;
    const u32 full = sums_at + 4 * p.M * kTokenSums<kTiles>, empty = full + 8 * x_depth;
    const u32 weights_full = empty + 8 * x_depth;
    const u32 weights_read = weights_full + 8 * kMediumWarps * p.depth;
    if (threadIdx.x == 0) {
        for (int d = 0; d < x_depth; d++) {
            barrier_init(full + 8 * d, 32 * kXWarps);
            barrier_init(empty + 8 * d, kMediumWarps * kWarpArrivals);
        }
        for (int d = 0; d < kMediumWarps * p.depth; d++)
            barrier_init(weights_full + 8 * d, kFullArrivals);
        for (int w = 0; w < kMediumWarps; w++) barrier_init(weights_read + 8 * w, kWarpArrivals);
        publish_barriers();
    }
    __syncthreads();
    launch_dependents();
    if (warp >= kMediumWarps) {
        produce_activations(p, work, cluster, x_stages, kXBytes, full, empty,
                                  threadIdx.x - 32 * kMediumWarps);
        return;
    }
    const u32 my_weights_full = weights_full + 8 * warp * p.depth;
    const u32 my_weights = weights_at + warp * RT * kUnitBytes;
    WeightStream<RT> stream(p, work, my_weights, kWeightBytes, my_weights_full, warp, lane);
    for (int d = 0; d < p.depth; d++) stream.copy_next();

    wait_for_previous_kernel();  // y may still be read by it, even where this block has no x
    const u32 words_at = my_weights + 16 * lane, scales_at = my_weights + 1024 + 4 * lane;
    const u32 x_at = x_stages + g * kTokenBytes + 32 * t;
    Place x_place, weights_place;
    u32 read_parity = 0;
    for (int pass = 0; pass < work.passes; pass++) {
        const int tile = work.first(pass), tiles = work.first(pass + 1) - tile;
        const int mine = work.tiles_of(pass, warp);
        SumsFinish<MODE, kTiles>(p, tile, tiles).prefetch(p);
        float acc[RT][NT][4] = {};
        for (int chunk = work.chunk0; chunk < work.chunk1; chunk++) {
            barrier_wait(full + 8 * x_place.slot, x_place.parity);  // also without a tile: in step
            if (mine > 0) {
                const u32 weights = weights_place.slot * kWeightBytes;
                const u32 x = x_at + x_place.slot * kXBytes;
                auto multiply = [&](int k, int left) {
                    const u32 from = weights + k * kTileBytes;
                    if (mine == RT)
                        multiply_block<MODE, NT, RT, RT>(acc, words_at + from, scales_at + from,
                                                         x + 256 * k, left, t);
                    else
                        multiply_block<MODE, NT, 1, RT>(acc, words_at + from, scales_at + from,
                                                        x + 256 * k, left, t);
                };
                barrier_wait(my_weights_full + 8 * weights_place.slot, weights_place.parity);
                const int left = p.K - chunk * 256;
                if (left >= 256) {
                    multiply(0, 128);
                    multiply(1, 128);
                } else {
                    multiply(0, left);
                    if (left > 128) multiply(1, left - 128);
                }
                // A copy may overtake loads that were only issued (docs/log.md). The arrival stands
                // behind them in the same pipe; when it has been seen they are done.
                __syncwarp();
                if (arrives(lane)) barrier_arrive(weights_read + 8 * warp);
                barrier_wait(weights_read + 8 * warp, read_parity);
                read_parity ^= 1;
                weights_place.next(p.depth);
                stream.copy_next();
            }
            if (arrives(lane)) barrier_arrive(empty + 8 * x_place.slot);
            x_place.next(x_depth);
        }

        // My sums to shared memory, where all blocks of the cluster read them.
        SumsFinish<MODE, kTiles> finish(p, work.first(pass), tiles);
        finish.fetch(p);
        const float input_scale = p.input_scale ? *p.input_scale : 1.f;
        float* sums = (float*)(shared + (sums_at - weights_at));
#pragma unroll
        for (int r = 0; r < RT; r++) {
            if (r >= mine) break;
            keep_sums<NT, kTiles>(sums + 16 * (warp + r * kMediumWarps), acc[r], p.M, lane);
        }
        if (cluster.size > 1) cluster.sync();
        else consumers_sync();
        finish(p, cluster, sums_at, 0, p.M, input_scale);
        // Before they are overwritten by the next pass, or my shared memory is gone.
        if (cluster.size > 1) cluster.sync();
        else if (pass + 1 < work.passes) consumers_sync();
    }
}
