// Activations as the B operand of mma: a lane holds 16 consecutive columns (one scale block) of one
// token per 64 columns of K, read row-major as they come, converted once per unit of K.
#pragma once
#include "ptx.cuh"

// What happens to activations on the way in.
enum XMode { X_F16 = 0, X_BF16 = 1, X_QUANTISE_F16 = 2, X_QUANTISE_BF16 = 3 };

__device__ constexpr bool is_bf16(int mode) { return mode == X_BF16 || mode == X_QUANTISE_BF16; }
__device__ constexpr bool is_quantised(int mode) { return mode >= X_QUANTISE_F16; }

__device__ __forceinline__ float max_with_nan(float a, float b) {
    float d;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

// Nearest E4M3, ties to even, of 2^-9 <= v <= 448; NaN stays NaN.
__device__ __forceinline__ float round_e4m3(float v) {
    // Below 2^-6 the quantum is 2^-9, above it is 2^(exponent - 3).
    const u32 exponent = max(__float_as_uint(v) >> 23, 121u);  // 121: 2^-6
    const float magic = __uint_as_float((exponent + 20u) << 23) * 1.5f;
    return (v + magic) - magic;
}

// Nearest E2M1 magnitude, ties to even, of a >= 0; saturates at 6.
__device__ __forceinline__ float round_e2m1(float a) {
    const float magic = a < 2.f ? 6291456.f : a < 4.f ? 12582912.f : 25165824.f;  // quantum .5, 1, 2
    return fminf((a + magic) - magic, 6.f);
}

// One block of 16 activations (8 pairs) to e2m1 * e4m3, exact in fp16. `input_scale` is left out.
// A block with NaN or infinity becomes NaN.
template <bool kBf16>
__device__ __forceinline__ void quantise_block(u32 (&pairs)[8], float input_scale) {
    float v[16];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (kBf16) {
            v[2 * i] = bf16_to_f32((u16)pairs[i]);
            v[2 * i + 1] = bf16_to_f32((u16)(pairs[i] >> 16));
        } else {
            v[2 * i] = f16_to_f32((u16)pairs[i]);
            v[2 * i + 1] = f16_to_f32((u16)(pairs[i] >> 16));
        }
    }
    float amax = fabsf(v[0]);
#pragma unroll
    for (int i = 1; i < 16; i++) amax = max_with_nan(amax, fabsf(v[i]));
    float scale = amax / (6.f * input_scale);
    scale = round_e4m3(fminf(fmaxf(scale, 0.001953125f), 448.f));
    if (!(amax < __uint_as_float(0x7F800000u))) scale = __uint_as_float(0x7FC00000u);
    const float divisor = scale * input_scale;
    const float reciprocal = 1.f / divisor;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float a = fabsf(v[i]);
        float q = a * reciprocal;
        q = fmaf(fmaf(-q, divisor, a), reciprocal, q);  // the correctly rounded quotient
        v[i] = copysignf(round_e2m1(q) * scale, v[i]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) pairs[i] = pack_f16x2(v[2 * i], v[2 * i + 1]);
}

// HALVES x 64 columns of 8 tokens (one per lane group), as fp16 pairs.
template <int MODE, int HALVES>
struct Activations {
    u32 pairs[HALVES][8];
    // X_BF16: the accumulators of tokens 2t and 2t+1 are in units of these powers of two.
    float factor[2];

    // Lane (g, t) takes columns column + 64 h + 16 t .. +15 of token g; absent ones are 0.
    __device__ __forceinline__ void load(const u16* x, int token, int M, int K, int column,
                                         int lane, float input_scale) {
        const int t = lane & 3;
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            const int first = column + 64 * h + 16 * t;
#pragma unroll
            for (int i = 0; i < 8; i++) pairs[h][i] = 0;
            if (token < M && first < K) {
                const u16* source = x + (u64)token * K + first;
                const Vec4 low = load_global_16(source), high = load_global_16(source + 8);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    pairs[h][i] = low.v[i];
                    pairs[h][4 + i] = high.v[i];
                }
            }
        }
        if (MODE == X_BF16) to_scaled_f16(lane);
        if (is_quantised(MODE)) {
#pragma unroll
            for (int h = 0; h < HALVES; h++) quantise_block<is_bf16(MODE)>(pairs[h], input_scale);
        }
    }

    // bf16 to fp16 through a power of two per token, so that the largest of these columns lands
    // just below 2^15: exact for everything within 2^-32 of it.
    __device__ __forceinline__ void to_scaled_f16(int lane) {
        u32 top = 0;
#pragma unroll
        for (int h = 0; h < HALVES; h++)
#pragma unroll
            for (int i = 0; i < 8; i++) top = max_bf16x2(top, pairs[h][i] & 0x7FFF7FFFu);
        u32 largest = max(top & 0xFFFFu, top >> 16);  // bits of non-negative bf16 order as integers
        largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
        largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
        const u32 exponent = max(largest >> 7, 15u);  // biased; the factor back must stay normal
        const u32 scale = (268u - exponent) << 7;     // bf16 of 2^(14 - (exponent - 127))
        const u32 scale2 = scale | (scale << 16);
#pragma unroll
        for (int h = 0; h < HALVES; h++)
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const u32 v = mul_bf16x2(pairs[h][i], scale2);
                pairs[h][i] = pack_f16x2(__uint_as_float(v << 16),
                                         __uint_as_float(v & 0xFFFF0000u));
            }
        // Lane 4n holds token n; columns 2t and 2t+1 of the accumulators are tokens 2t and 2t+1.
        const u32 back = (exponent - 14u) << 23;
        factor[0] = __uint_as_float(__shfl_sync(0xFFFFFFFFu, back, 8 * (lane & 3)));
        factor[1] = __uint_as_float(__shfl_sync(0xFFFFFFFFu, back, 8 * (lane & 3) + 4));
    }
};
