// From stored weights to the A operand of mma: E2M1 codes to halves, E4M3 scales to halves.
//
// A word holds 8 codes of one lane: rows g and g+8, columns c .. c+3. Registers a[0..3] are
// (row g, c..c+1), (row g+8, c..c+1), (row g, c+2..c+3), (row g+8, c+2..c+3).
#pragma once
#include "ptx.cuh"

#if __CUDA_ARCH__ >= 1000
#define NVFP4R_NATIVE_FP4 1  // targets 100a, 103a, 120a, 121a convert E2M1 pairs in hardware
#else
#define NVFP4R_NATIVE_FP4 0
#endif

// Exponent that decode_word leaves in the values; the epilogue multiplies it away in float32.
__device__ constexpr float kDecodeFactor = NVFP4R_NATIVE_FP4 ? 1.0f : 16384.0f;

__device__ __forceinline__ void decode_word(u32 v, u32 (&a)[4]) {
#if NVFP4R_NATIVE_FP4
    // Nibble order: byte i of the word is register i.
    asm("{\n.reg .b8 b0, b1, b2, b3;\n"
        "mov.b32 {b0, b1, b2, b3}, %4;\n"
        "cvt.rn.f16x2.e2m1x2 %0, b0;\n"
        "cvt.rn.f16x2.e2m1x2 %1, b1;\n"
        "cvt.rn.f16x2.e2m1x2 %2, b2;\n"
        "cvt.rn.f16x2.e2m1x2 %3, b3;\n}"
        : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(v));
#else
    // Bit-plane order (docs/layout.md): sign to bit 15, magnitude to bits 11:9 of each half, which
    // as fp16 is value * 2^-14, subnormals included.
    a[0] = v & 0x8E008E00u;
    a[1] = (v << 3) & 0x8E008E00u;
    a[2] = ((v << 6) & 0x0E000E00u) | ((v << 1) & 0x80008000u);
    a[3] = ((v << 9) & 0x0E000E00u) | ((v << 2) & 0x80008000u);
#endif
}

// Two E4M3 bytes (low byte: row g, high byte: row g+8) to two halves, exact.
__device__ __forceinline__ u32 decode_scales(u32 bytes) {
    u32 d;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"((u16)bytes));
#else
    // Bits shifted into an fp16 are value * 2^-8; scales are never negative.
    d = mul_f16x2(((bytes & 0x7Fu) << 7) | ((bytes & 0x7F00u) << 15), 0x5C005C00u);
#endif
    return d;
}

// Both halves of a register the same: the low one, the high one.
__device__ __forceinline__ u32 both_low(u32 v) { return __byte_perm(v, v, 0x1010); }
__device__ __forceinline__ u32 both_high(u32 v) { return __byte_perm(v, v, 0x3232); }
