// quantize.cuh's prologue over `blocks` blocks of 16 values, in place; returns how many saturated.
#include "quantize.cuh"

extern "C" u64 prologue(u16* x, u64 blocks, int is_bf16, int steps, float scale) {
    u64 saturated = 0;
    for (u64 i = 0; i < blocks; i++) {
        u32 block[8];
        std::memcpy(block, x + 16 * i, sizeof block);
        saturated += is_bf16 ? prepare_block<X_BF16>(block, steps, scale)
                             : prepare_block<X_F16>(block, steps, scale);
        std::memcpy(x + 16 * i, block, sizeof block);
    }
    return saturated;
}
