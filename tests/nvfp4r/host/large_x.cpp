// arrange_x of kernels/large_x.cuh by loops over the threads of its warps.
#include "quantize.cuh"
#define store_matrices store_matrices_on_gpu
#include "wgmma.cuh"
#undef store_matrices

static u8* ring;

// The values of this lane alone; lane 0 has the first of rows that follow each other.
static void store_matrices(u32 row, u32 a, u32 b, u32 c, u32 d) {
    const u32 lane = threadIdx.x & 31, values[4] = {a, b, c, d};
    for (u32 i = 0; i < 4; i++)
        std::memcpy(ring + row - 16 * lane + 128 * i + 4 * lane, &values[i], 4);
}
template <int OFFSET>
static void load_block_if(u32 (&d)[8], const void* p, int first, int limit) {
    if (first < limit) std::memcpy(d, (const u8*)p + OFFSET, sizeof d);
}

#include "large_x.cuh"

template <int NT>
static void arrange_all(const LargeArgs& p, const Cluster& cluster) {
    const LargeWork work(p, cluster, 8 * NT);
    for (threadIdx.x = 0; threadIdx.x < 32 * kDirectWarps; threadIdx.x++)
        arrange_x<NT>(p, work, 0, 0, 8 * p.x_depth, threadIdx.x >> 5, threadIdx.x & 31, cluster);
}

// Block `rank` of the first of `clusters` clusters of `size`; `seen` are arrivals and the parity of
// the last wait, of the full and of the empty barriers.
extern "C" void arrange_x_on_host(const char* argument, int groups, int rank, int size,
                                  int clusters, u8* stages, int* seen) {
    LargeArgs p;
    std::memcpy(&p, argument, sizeof p);
    Cluster cluster;
    cluster.rank = rank;
    cluster.size = size;
    gridDim.x = clusters * size;
    blockIdx.x = rank;
    ring = stages;
    std::memset(barriers, 0, sizeof barriers);
    if (groups == 8) arrange_all<8>(p, cluster);
    else arrange_all<16>(p, cluster);
    std::memcpy(seen, barriers, 2 * p.x_depth * sizeof(Barrier));
}
extern "C" int argument_bytes() { return sizeof(LargeArgs); }
