// The one module of this package: every kernel, compiled for one target. Names as plan/ spells
// them. HELD is how many CTAs of a kernel an SM shall hold, which bounds registers.
#if NVFP4R_HAS_WGMMA
#include "arrange.cuh"
#include "linear_large.cuh"
#endif
#include "linear_medium.cuh"
#include "linear_shared.cuh"
#include "linear_small.cuh"
#include "quantize.cuh"
#include "unpack.cuh"

// linear_small_<dtype>_w<consumer warps>, and with _s for x in shared memory, prepared on its way.
#define SMALL(NAME, MODE, W, HELD)                                                              \
    extern "C" __global__ void __launch_bounds__(32 * (W + 1), HELD)                            \
        linear_small_##NAME##_w##W(const __grid_constant__ LinearArgs p) {                      \
        linear_small<MODE, W>(p);                                                               \
    }
#define SHARED(NAME, MODE, W, HELD)                                                             \
    extern "C" __global__ void __launch_bounds__(32 * (W + 2), HELD)                            \
        linear_small_##NAME##_w##W##_s(const __grid_constant__ LinearArgs p) {                  \
        linear_shared<MODE, W>(p);                                                              \
    }

// linear_medium_<dtype>_n<tokens / 8>_r<row tiles a warp>. LIMIT bounds registers: to what lets an
// SM hold so many CTAs, or to a number, where ptxas would use more than there are and spill.
#define CTAS(N) __launch_bounds__(32 * (kMediumWarps + kXWarps), N)
#define REGISTERS(N) __maxnreg__(N)
#define MEDIUM(NAME, MODE, NT, RT, LIMIT)                                                       \
    extern "C" __global__ void LIMIT                                                            \
        linear_medium_##NAME##_n##NT##_r##RT(const __grid_constant__ LinearArgs p) {            \
        linear_medium<MODE, NT, RT>(p);                                                         \
    }

#define ALL(NAME, MODE)                                                                         \
    SMALL(NAME, MODE, 4, 6)                                                                     \
    SMALL(NAME, MODE, 8, 3)                                                                     \
    SMALL(NAME, MODE, 12, 2)                                                                    \
    SHARED(NAME, MODE, 4, 4)                                                                    \
    SHARED(NAME, MODE, 12, 2)                                                                   \
    MEDIUM(NAME, MODE, 2, 1, CTAS(2))                                                           \
    MEDIUM(NAME, MODE, 2, 2, CTAS(2))                                                           \
    MEDIUM(NAME, MODE, 4, 1, CTAS(2))                                                           \
    MEDIUM(NAME, MODE, 6, 1, REGISTERS(136))                                                    \
    MEDIUM(NAME, MODE, 6, 2, CTAS(1))                                                           \
    MEDIUM(NAME, MODE, 8, 1, CTAS(1))                                                           \
    MEDIUM(NAME, MODE, 8, 2, CTAS(1))                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                           \
        quantize_##NAME(const __grid_constant__ QuantizeArgs p) {                               \
        quantize<MODE>(p);                                                                      \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                           \
        unpack_##NAME(const __grid_constant__ UnpackArgs p) {                                   \
        unpack<MODE>(p);                                                                        \
    }

ALL(f16, X_F16)
ALL(bf16, X_BF16)

#if NVFP4R_HAS_WGMMA
// linear_large_<dtype>_n<tokens / 8>_r<row tiles a warp>, and what puts x into its order.
#define LARGE(NAME, MODE, NT, RT)                                                               \
    extern "C" __global__ void __launch_bounds__(large_threads(NT, RT), 1)                      \
        linear_large_##NAME##_n##NT##_r##RT(const __grid_constant__ LargeArgs p) {              \
        linear_large<MODE, NT, RT>(p);                                                          \
    }
#define ALL_LARGE(NAME, MODE)                                                                   \
    LARGE(NAME, MODE, 8, 1)                                                                     \
    LARGE(NAME, MODE, 8, 2)                                                                     \
    LARGE(NAME, MODE, 8, 3)                                                                     \
    LARGE(NAME, MODE, 16, 1)                                                                    \
    LARGE(NAME, MODE, 16, 2)                                                                    \
    LARGE(NAME, MODE, 24, 1)                                                                    \
    LARGE(NAME, MODE, 32, 1)                                                                    \
    extern "C" __global__ void __launch_bounds__(256)                                           \
        arrange_##NAME(const __grid_constant__ ArrangeArgs p) {                                 \
        arrange<MODE>(p);                                                                       \
    }

ALL_LARGE(f16, X_F16)
ALL_LARGE(bf16, X_BF16)
#endif
