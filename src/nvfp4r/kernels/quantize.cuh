// What may happen to activations before they are multiplied, a block of 16 columns at a time: a
// rotation, and rounding to NVFP4 and back (e2m1 * e4m3, exact in 16 bits).
//
// The rounding is that of nvfp4r/quantize.py, bit for bit: nearest, ties to the even code, scales
// within 2^-9 .. 448. No quotient decides anything. A magnitude x lies above a midpoint if
// x > m * scale; x is a float32, so that is x > (m * scale rounded down) and, for the midpoints that
// round up, x >= (m * scale rounded up); the multiplication can be told to round either way.
#pragma once
#include "decode.cuh"

// The value of E4M3 byte b, 0 .. 126.
__device__ __forceinline__ float e4m3_value(int b) {
    const int e = b >> 3, m = b & 7;
    return e ? __int_as_float(((e + 120) << 23) | (m << 20)) : (float)m * 0.001953125f;
}

// True if amax / (6 * scale) rounds to byte b + 1 or above.
__device__ __forceinline__ bool scale_above(int b, float amax, float scale) {
    const float bound = 3.f * (e4m3_value(b) + e4m3_value(b + 1));  // 6 * midpoint, exact
    return b & 1 ? amax >= mul_up(bound, scale) : amax > mul_down(bound, scale);
}

// The E4M3 byte that amax / (6 * scale) rounds to, 1 .. 126. A quotient gives a first guess, which
// is at most one off.
__device__ __forceinline__ int block_scale_byte(float amax, float scale) {
    const float q = fminf(amax / scale * 0.16666667f, 448.f);
    // The bits of a normal E4M3, cut off; below 2^-6 the steps are of 2^-9.
    int b = q < 0.015625f ? (int)(q * 512.f) : (int)(__float_as_uint(q) >> 20) - (120 << 3);
    b = min(max(b, 1), 126);
    if (b > 1 && !scale_above(b - 1, amax, scale)) b--;
    if (b < 126 && scale_above(b, amax, scale)) b++;
    return b;
}

// Bits of a prologue.
__device__ constexpr int kRotate = 1, kQuantize = 2;

struct Block { u32 v[8]; };  // 16 values

__device__ __forceinline__ Block load_block(const void* from) {
    Block b;
    asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%8];\n"
                 "ld.global.v4.b32 {%4,%5,%6,%7}, [%8 + 16];"
                 : "=r"(b.v[0]), "=r"(b.v[1]), "=r"(b.v[2]), "=r"(b.v[3]),
                   "=r"(b.v[4]), "=r"(b.v[5]), "=r"(b.v[6]), "=r"(b.v[7])
                 : "l"(from));
    return b;
}
__device__ __forceinline__ void store_block(void* to, const Block& b) {
    asm volatile("st.global.v4.b32 [%8], {%0,%1,%2,%3};\n"
                 "st.global.v4.b32 [%8 + 16], {%4,%5,%6,%7};"
                 :: "r"(b.v[0]), "r"(b.v[1]), "r"(b.v[2]), "r"(b.v[3]),
                    "r"(b.v[4]), "r"(b.v[5]), "r"(b.v[6]), "r"(b.v[7]), "l"(to) : "memory");
}
__device__ __forceinline__ Block load_block_shared(u32 from) {
    const Vec4 a = load_shared_16(from), b = load_shared_16(from + 16);
    return {{a.v[0], a.v[1], a.v[2], a.v[3], b.v[0], b.v[1], b.v[2], b.v[3]}};
}
__device__ __forceinline__ void store_block_shared(u32 to, const Block& b) {
    asm volatile("st.shared.v4.b32 [%8], {%0,%1,%2,%3};\n"
                 "st.shared.v4.b32 [%8 + 16], {%4,%5,%6,%7};"
                 :: "r"(b.v[0]), "r"(b.v[1]), "r"(b.v[2]), "r"(b.v[3]),
                    "r"(b.v[4]), "r"(b.v[5]), "r"(b.v[6]), "r"(b.v[7]), "r"(to) : "memory");
}

// The product with the orthogonal Hadamard matrix (Sylvester's order), by butterflies in float32: the
// order of the sums is that of nvfp4r/methods/rotation.py, so the bits are the same.
__device__ __forceinline__ void rotate_values(float (&v)[16]) {
#pragma unroll
    for (int step = 1; step < 16; step *= 2) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            if (i & step) continue;
            const float a = v[i], b = v[i + step];
            v[i] = a + b;
            v[i + step] = a - b;
        }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) v[i] *= 0.25f;
}

// Rounds 16 values to e2m1 * e4m3. Returns whether their scale is above 464, too large.
__device__ __forceinline__ bool quantize_values(float (&v)[16], float scale) {
    u32 magnitude = 0;  // the largest, as bits: NaN and infinity are above all numbers
#pragma unroll
    for (int i = 0; i < 16; i++) magnitude = max(magnitude, __float_as_uint(v[i]) & 0x7FFFFFFFu);
    constexpr u32 kInfinity = 0x7F800000u;
    if (magnitude >= kInfinity || !(scale > 0.f && scale < __uint_as_float(kInfinity))) {
#pragma unroll
        for (int i = 0; i < 16; i++) v[i] = __uint_as_float(0x7FFFFFFFu);  // NaN, for all to see
        return magnitude == kInfinity && scale > 0.f;
    }
    const float amax = __uint_as_float(magnitude);
    const float step = e4m3_value(block_scale_byte(amax, scale));
    const float above0 = mul_down(0.25f * step, scale), above1 = mul_up(0.75f * step, scale);
    const float above2 = mul_down(1.25f * step, scale), above3 = mul_up(1.75f * step, scale);
    const float above4 = mul_down(2.5f * step, scale), above5 = mul_up(3.5f * step, scale);
    const float above6 = mul_down(5.f * step, scale);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float a = fabsf(v[i]);
        float q = a > above0 ? 0.5f : 0.f;
        q = a >= above1 ? 1.f : q;
        q = a > above2 ? 1.5f : q;
        q = a >= above3 ? 2.f : q;
        q = a > above4 ? 3.f : q;
        q = a >= above5 ? 4.f : q;
        q = a > above6 ? 6.f : q;
        v[i] = (v[i] < 0.f ? -q : q) * step;
    }
    return amax > mul_down(2784.f, scale);  // 6 * 464
}

// One block of 16 values in 8 registers of two, through the prologue. Returns whether its scale is
// above 464, too large.
template <int MODE>
__device__ __forceinline__ bool prepare_block(u32 (&x)[8], int prologue, float scale) {
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const u16 bits = (u16)(x[i / 2] >> 16 * (i & 1));
        v[i] = MODE == X_BF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
    }
    if (prologue & kRotate) rotate_values(v);
    const bool saturated = (prologue & kQuantize) && quantize_values(v, scale);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 low = MODE == X_BF16 ? f32_to_bf16(v[2 * i]) : f32_to_f16(v[2 * i]);
        const u32 high = MODE == X_BF16 ? f32_to_bf16(v[2 * i + 1]) : f32_to_f16(v[2 * i + 1]);
        x[i] = low | high << 16;
    }
    return saturated;
}

// torch.ops.nvfp4r.quantize and rotate
struct QuantizeArgs {
    const u16* x;        // [blocks][16] fp16 or bf16
    u16* values;         // [blocks][16], x's dtype
    u64* saturated;      // [], to be added to: how many blocks are too large; or null for no count
    const float* scale;  // [], or null without kQuantize
    u64 blocks;
    int prologue;
};

template <int MODE>
__device__ __forceinline__ void quantize(const QuantizeArgs& p) {
    launch_dependents();
    wait_for_previous_kernel();
    const float scale = p.scale ? *p.scale : 0.f;
    const u64 step = (u64)gridDim.x * blockDim.x;
    u32 saturated = 0;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < p.blocks; i += step) {
        Block block = load_block(p.x + 16 * i);
        saturated += prepare_block<MODE>(block.v, p.prologue, scale);
        store_block(p.values + 16 * i, block);
    }
    if (saturated && p.saturated)
        asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;"
                     :: "l"(p.saturated), "l"((u64)saturated) : "memory");
}
