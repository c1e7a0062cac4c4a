// From stored weights to the A operand of mma: codes times block scales, exact in 16 bits.
//
// A word holds 8 codes of one lane: rows g and g+8, columns c .. c+3. Registers a[0..3] are
// (row g, c..c+1), (row g+8, c..c+1), (row g, c+2..c+3), (row g+8, c+2..c+3).
// docs/layout.md gives the bit order of words and the encoding of scales.
#pragma once
#include "ptx.cuh"

enum XMode { X_F16 = 0, X_BF16 = 1 };

// What the decoded products are too small by; the epilogue multiplies it back in float32.
// fp16: codes are value * 2^-14, scales value * 2^7. bf16: value * 2^-126 and value * 2^118.
template <int MODE>
__device__ constexpr float kDecodeFactor = MODE == X_BF16 ? 256.0f : 128.0f;

template <int MODE>
__device__ __forceinline__ void decode_word(u32 v, u32 (&a)[4]) {
    if (MODE == X_BF16) {
        // Sign to bit 15, magnitude to bits 8:6 of each half: as bf16, value * 2^-126.
        a[0] = v & 0x81C081C0u;
        a[1] = (v << 3) & 0x81C081C0u;
        a[2] = ((v << 6) & 0x01C001C0u) | ((v << 1) & 0x80008000u);
        a[3] = ((v >> 3) & 0x01C001C0u) | ((v << 2) & 0x80008000u);
    } else {
        // Sign to bit 15, magnitude to bits 11:9: as fp16, value * 2^-14, subnormals included.
        a[0] = v & 0x8E008E00u;
        a[1] = (v << 3) & 0x8E008E00u;
        a[2] = ((v << 6) & 0x0E000E00u) | ((v << 1) & 0x80008000u);
        a[3] = ((v << 9) & 0x0E000E00u) | ((v << 2) & 0x80008000u);
    }
}

// Scales of one half tile (rows g and g+8) from a lane's four bytes [h0 g, h1 g, h0 g+8, h1 g+8].
// A byte is E5M3 without sign: exponent + 22 in bits 7:3, never subnormal.
template <int MODE>
__device__ __forceinline__ u32 decode_scales(u32 bytes, int half) {
    if (MODE == X_BF16) {
        const u32 bits = half == 0 ? (bytes & 0x00FF00FFu) * 16u : (bytes & 0xFF00FF00u) >> 4;
        return bits + 0x6F806F80u;  // exponent field + 223: value * 2^(223 + 22 - 127) = 2^118
    }
    // Exponent field as it is: value * 2^(22 - 15) = 2^7.
    return half == 0 ? (bytes & 0x00FF00FFu) << 7 : (bytes & 0xFF00FF00u) >> 1;
}

template <int MODE>
__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
    return MODE == X_BF16 ? mul_bf16x2(a, b) : mul_f16x2(a, b);
}

// Both halves of a register the same; in this form ptxas folds it into the multiplication.
__device__ __forceinline__ u32 both_low(u32 v) {
    u32 d;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(d) : "r"(v));
    return d;
}
__device__ __forceinline__ u32 both_high(u32 v) {
    u32 d;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(d) : "r"(v));
    return d;
}
