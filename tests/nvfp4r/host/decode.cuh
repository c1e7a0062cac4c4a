// Stands in for kernels/decode.cuh (and ptx.cuh) where quantize.cuh and arrange.cuh are compiled for
// the host: the few instructions that their arithmetic uses, with the rounding that PTX defines.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

struct alignas(16) Vec4 { u32 v[4]; };
Vec4 load_shared_16(u32 address);  // of functions that are not called here

enum XMode { X_F16 = 0, X_BF16 = 1 };

template <class To, class From>
static To same_bits(From from) {
    To to;
    static_assert(sizeof(To) == sizeof(From), "another size");
    std::memcpy(&to, &from, sizeof(To));
    return to;
}
static float __uint_as_float(u32 bits) { return same_bits<float>(bits); }
static float __int_as_float(int bits) { return same_bits<float>(bits); }
static u32 __float_as_uint(float value) { return same_bits<u32>(value); }

// A product of two floats is exact in double.
static float mul_down(float a, float b) {
    const double exact = (double)a * b;
    const float nearest = (float)exact;
    return nearest > exact ? std::nextafterf(nearest, -INFINITY) : nearest;
}
static float mul_up(float a, float b) {
    const double exact = (double)a * b;
    const float nearest = (float)exact;
    return nearest < exact ? std::nextafterf(nearest, INFINITY) : nearest;
}

static float bf16_to_f32(u16 bits) { return __uint_as_float((u32)bits << 16); }
static u16 f32_to_bf16(float value) {
    if (std::isnan(value)) return 0x7FFF;
    const u32 bits = __float_as_uint(value);
    return (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
static float f16_to_f32(u16 bits) { return (float)same_bits<_Float16>(bits); }
static u16 f32_to_f16(float value) {
    return std::isnan(value) ? 0x7FFF : same_bits<u16>((_Float16)value);
}

// What the kernels around the arithmetic use: set by loops in arrange.cpp.
struct Index { unsigned x; };
static Index gridDim, blockDim, blockIdx, threadIdx;
static void launch_dependents() {}
static void wait_for_previous_kernel() {}
