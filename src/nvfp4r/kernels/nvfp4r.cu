// The one module of this package: every kernel, for whatever target it is compiled for.
#include "linear_small.cuh"

#define SMALL(NAME, MODE, NT, RT, THREADS)                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                   \
        small_##NAME##_n##NT##_r##RT(const __grid_constant__ LinearArgs p) {                   \
        linear_small<MODE, NT, RT>(p);                                                         \
    }
SMALL(f16, X_F16, 1, 1, 960)
SMALL(f16, X_F16, 1, 2, 832)
SMALL(bf16, X_BF16, 1, 1, 960)
SMALL(bf16, X_BF16, 1, 2, 832)
SMALL(bf16, X_BF16, 1, 3, 704)
SMALL(bf16, X_BF16, 2, 1, 640)
SMALL(bf16, X_BF16, 2, 2, 640)
