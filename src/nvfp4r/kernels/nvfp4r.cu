// The one module of this package: every kernel, for whatever target it is compiled for.
#include "linear_small.cuh"

// MAX_WARPS bounds registers; BLOCKS is how many CTAs of that size must fit on an SM.
#define SMALL(NAME, MODE, NT, RT)                                                              \
    extern "C" __global__ void __launch_bounds__(512, 1)                                       \
        small_##NAME##_n##NT##_r##RT(const __grid_constant__ LinearArgs p) {                   \
        linear_small<MODE, NT, RT>(p);                                                         \
    }
#define SMALL_ALL(NAME, MODE)                                                                  \
    SMALL(NAME, MODE, 1, 1) SMALL(NAME, MODE, 1, 2) SMALL(NAME, MODE, 1, 4)                    \
    SMALL(NAME, MODE, 1, 5) SMALL(NAME, MODE, 2, 1) SMALL(NAME, MODE, 2, 2) SMALL(NAME, MODE, 2, 4)

SMALL_ALL(f16, X_F16)
SMALL_ALL(bf16, X_BF16)
