// The one module of this package: every kernel, compiled for one target. Names as plan.py spells
// them. HELD is how many CTAs of a kernel an SM shall hold, which bounds registers.
#include "linear_medium.cuh"
#include "linear_small.cuh"
#include "quantize.cuh"
#include "unpack.cuh"

// linear_small_<dtype>_w<consumer warps>, and with _q for activations that are quantised or rotated
// on the way.
#define SMALL(NAME, MODE, W, Q, PREPARE, HELD)                                                  \
    extern "C" __global__ void __launch_bounds__(32 * (W + 1), HELD)                            \
        linear_small_##NAME##_w##W##Q(const __grid_constant__ LinearArgs p) {                   \
        linear_small<MODE, W, PREPARE>(p);                                                      \
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
    SMALL(NAME, MODE, 4, , false, 6)                                                            \
    SMALL(NAME, MODE, 8, , false, 3)                                                            \
    SMALL(NAME, MODE, 12, , false, 2)                                                           \
    SMALL(NAME, MODE, 4, _q, true, 4)                                                           \
    SMALL(NAME, MODE, 8, _q, true, 2)                                                           \
    SMALL(NAME, MODE, 12, _q, true, 1)                                                          \
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
