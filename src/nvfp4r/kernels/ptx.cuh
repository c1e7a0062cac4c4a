// PTX instructions behind names. No CUDA header is used, so that NVRTC needs none. What a target can
// do comes as NVFP4R_HAS_* from the table in jit/arch.py.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(16) Vec4 { u32 v[4]; };

__device__ __forceinline__ u32 shared_address(const void* p) {
    u64 a;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(a) : "l"(p));
    return (u32)a;
}

// ---- arithmetic on two halves -------------------------------------------------------------

__device__ __forceinline__ u32 mul_f16x2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
    u32 d;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else  // a * b + (-0)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
    return d;
}

__device__ __forceinline__ u16 f32_to_f16(float v) {
    u16 d;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(v));
    return d;
}

__device__ __forceinline__ u16 f32_to_bf16(float v) {
    u16 d;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(v));
    return d;
}

__device__ __forceinline__ float f16_to_f32(u16 v) {
    float d;
    asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(v));
    return d;
}

__device__ __forceinline__ float bf16_to_f32(u16 v) { return __uint_as_float((u32)v << 16); }

// Products rounded down and up.
__device__ __forceinline__ float mul_down(float a, float b) {
    float d;
    asm("mul.rm.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
__device__ __forceinline__ float mul_up(float a, float b) {
    float d;
    asm("mul.rp.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

// ---- matrix multiply-accumulate -----------------------------------------------------------

// d[16x8] += a[16x16] b[16x8], fp32 accumulators.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- memory ---------------------------------------------------------------------------------

__device__ __forceinline__ Vec4 load_shared_16(u32 address) {
    Vec4 r;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3])
                 : "r"(address));
    return r;
}

__device__ __forceinline__ u32 load_shared_4(u32 address) {
    u32 r;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(address));
    return r;
}

__device__ __forceinline__ void prefetch_to_l2(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" :: "l"(p));
}

__device__ __forceinline__ void store_global_8(void* target, u32 a, u32 b) {
    asm volatile("st.global.v2.b32 [%0], {%1,%2};" :: "l"(target), "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ void store_global_16(void* target, const Vec4& v) {
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};"
                 :: "l"(target), "r"(v.v[0]), "r"(v.v[1]), "r"(v.v[2]), "r"(v.v[3])
                 : "memory");
}

// 16 values, only where `first < limit`; elsewhere the registers stay as they are. A plain load:
// activations were written by the kernel before, and only a coherent load after
// wait_for_previous_kernel is sure to see that.
template <int OFFSET>
__device__ __forceinline__ void load_block_if(u32 (&d)[8], const void* p, int first, int limit) {
    asm volatile("{\n.reg .pred w;\nsetp.lt.s32 w, %9, %10;\n"
                 "@w ld.global.v4.b32 {%0,%1,%2,%3}, [%8 + %11];\n"
                 "@w ld.global.v4.b32 {%4,%5,%6,%7}, [%8 + %12];\n}"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]),
                   "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7])
                 : "l"(p), "r"(first), "r"(limit), "n"(OFFSET), "n"(OFFSET + 16));
}

// ---- kernel boundaries ------------------------------------------------------------------------

// What follows may start its prologue; it must wait itself before it touches our output. Its wait is
// for us alone: whatever else was written before us is in place only once we have waited too. Our
// kernels read nothing else before their wait; for kernels that do (Inductor's), NVFP4R_LATE_TRIGGER
// puts the trigger behind our wait.
__device__ __forceinline__ void launch_dependents() {
#if NVFP4R_HAS_PDL && !NVFP4R_LATE_TRIGGER
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Everything that the kernel before wrote is visible after this. A no-op without the attribute.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if NVFP4R_HAS_PDL
    asm volatile("griddepcontrol.wait;" ::: "memory");
#if NVFP4R_LATE_TRIGGER
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
#endif
}
