// d[64 rows x 8 NT columns] += a b by the four warps of a warpgroup (sm_90a): a in registers, b in
// shared memory, fp32 accumulators. A warp has 16 of the rows, its lanes the elements that
// mma.m16n8k16 would give them.
#pragma once
#include "ptx.cuh"

// Registers have been written; the instructions that follow may read them.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most N committed groups are unfinished.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}

// b in shared memory: 8 columns x 16 bytes of k next to each other, 128 bytes to the other half of
// k16, 1024 bytes to the next 8 columns, no swizzle.
__device__ __forceinline__ u64 wgmma_descriptor(u32 address) {
    return (u64)(address >> 4 & 0x3FFF) | (u64)(128 >> 4) << 16 | (u64)(1024 >> 4) << 32;
}

// Four fragments of 8 x 8 to shared memory, transposed: `column` is where a lane's 16 bytes go, a
// column of its quarter's fragment.
__device__ __forceinline__ void store_transposed(u32 column, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                 :: "r"(column), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// One k16 step of 8 NT columns.
template <int NT>
struct Wgmma;

#define D1(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define D4(i) D1(i), D1(i + 1), D1(i + 2), D1(i + 3)
#define D8(i) D4(i), D4(i + 4)
#define R8(a, b, c, d, e, f, g, h)                                                              \
    "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define R32_0                                                                                   \
    R8(0, 1, 2, 3, 4, 5, 6, 7) "," R8(8, 9, 10, 11, 12, 13, 14, 15) ","                         \
    R8(16, 17, 18, 19, 20, 21, 22, 23) "," R8(24, 25, 26, 27, 28, 29, 30, 31)
#define R32_1                                                                                   \
    R8(32, 33, 34, 35, 36, 37, 38, 39) "," R8(40, 41, 42, 43, 44, 45, 46, 47) ","               \
    R8(48, 49, 50, 51, 52, 53, 54, 55) "," R8(56, 57, 58, 59, 60, 61, 62, 63)
#define R32_2                                                                                   \
    R8(64, 65, 66, 67, 68, 69, 70, 71) "," R8(72, 73, 74, 75, 76, 77, 78, 79) ","               \
    R8(80, 81, 82, 83, 84, 85, 86, 87) "," R8(88, 89, 90, 91, 92, 93, 94, 95)
#define R32_3                                                                                   \
    R8(96, 97, 98, 99, 100, 101, 102, 103) "," R8(104, 105, 106, 107, 108, 109, 110, 111) ","   \
    R8(112, 113, 114, 115, 116, 117, 118, 119) "," R8(120, 121, 122, 123, 124, 125, 126, 127)

// A0 .. A3 and B number the operands after the accumulators.
#define WGMMA(NT, N, REGISTERS, DS, A0, A1, A2, A3, B)                                          \
    template <>                                                                                 \
    struct Wgmma<NT> {                                                                          \
        static __device__ __forceinline__ void bf16(float (&d)[NT][4], const u32 (&a)[4],       \
                                                    u64 b) {                                    \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "            \
                         "{" REGISTERS "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B         \
                         ", 1, 1, 1, 0;"                                                        \
                         : DS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));            \
        }                                                                                       \
        static __device__ __forceinline__ void f16(float (&d)[NT][4], const u32 (&a)[4],        \
                                                   u64 b) {                                     \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 "              \
                         "{" REGISTERS "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B         \
                         ", 1, 1, 1, 0;"                                                        \
                         : DS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));            \
        }                                                                                       \
    };

#define C2(a, b) a, b
#define C3(a, b, c) a, b, c
#define C4(a, b, c, d) a, b, c, d
WGMMA(8, 64, R32_0, D8(0), 32, 33, 34, 35, 36)
WGMMA(16, 128, R32_0 "," R32_1, C2(D8(0), D8(8)), 64, 65, 66, 67, 68)
WGMMA(24, 192, R32_0 "," R32_1 "," R32_2, C3(D8(0), D8(8), D8(16)), 96, 97, 98, 99, 100)
WGMMA(32, 256, R32_0 "," R32_1 "," R32_2 "," R32_3, C4(D8(0), D8(8), D8(16), D8(24)), 128, 129,
      130, 131, 132)
