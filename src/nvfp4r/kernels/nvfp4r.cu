// The one module of this package: every kernel, compiled for one target.
#include "linear_small.cuh"

// Names as plan.py spells them: linear_small_<dtype>_n<tokens / 8>_w<consumer warps>. BLOCKS is how
// many CTAs an SM shall hold, which bounds registers.
#define SMALL(NAME, MODE, NT, W, BLOCKS)                                                       \
    extern "C" __global__ void __launch_bounds__(32 * (W + 1), BLOCKS)                         \
        linear_small_##NAME##_n##NT##_w##W(const __grid_constant__ LinearArgs p) {             \
        linear_small<MODE, NT, W>(p);                                                          \
    }
#define SMALL_ALL(NAME, MODE)                                                                  \
    SMALL(NAME, MODE, 1, 4, 6)                                                                 \
    SMALL(NAME, MODE, 1, 8, 3)                                                                 \
    SMALL(NAME, MODE, 1, 12, 2)                                                                \
    SMALL(NAME, MODE, 2, 4, 3)                                                                 \
    SMALL(NAME, MODE, 2, 8, 1)                                                                 \
    SMALL(NAME, MODE, 2, 12, 1)

SMALL_ALL(f16, X_F16)
SMALL_ALL(bf16, X_BF16)
