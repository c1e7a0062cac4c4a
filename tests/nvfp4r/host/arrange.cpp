// kernels/arrange.cuh by loops over the threads of a grid, and the descriptor of wgmma.cuh.
#define load_block load_block_on_gpu
#include "quantize.cuh"
#undef load_block

static Block load_block(const void* from) {
    Block block;
    std::memcpy(&block, from, sizeof block);
    return block;
}

#include "arrange.cuh"
#include "wgmma.cuh"

extern "C" void arrange_on_host(const char* argument, int is_bf16, int ctas, int threads) {
    ArrangeArgs p;
    std::memcpy(&p, argument, sizeof p);
    gridDim.x = ctas;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
            if (is_bf16) arrange<X_BF16>(p);
            else arrange<X_F16>(p);
}
extern "C" int argument_bytes() { return sizeof(ArrangeArgs); }
extern "C" u64 descriptor(u32 address) { return wgmma_descriptor(address); }
