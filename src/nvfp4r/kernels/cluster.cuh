// Blocks of one cluster: who I am, a barrier across blocks, reads from a neighbour's shared memory.
// Without clusters every block is a cluster of its own, and none of the rest is called.
#pragma once
#include "ptx.cuh"

struct Cluster {
    u32 rank = 0, size = 1;

    __device__ __forceinline__ Cluster() {
#if NVFP4R_HAS_CLUSTER
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
#endif
    }

    // Every thread of every block of the cluster: what they wrote before is seen after.
    __device__ __forceinline__ void sync() const {
#if NVFP4R_HAS_CLUSTER
        __syncwarp();
        asm volatile("barrier.cluster.arrive.release.aligned;\n"
                     "barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    }

    // Address in block `rank_` of what is at `address` here.
    __device__ __forceinline__ u32 map(u32 address, u32 rank_) const {
#if NVFP4R_HAS_CLUSTER
        asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank_));
#endif
        return address;
    }
};

// 16 bytes of another block's shared memory, or of its own.
__device__ __forceinline__ Vec4 load_cluster_16(u32 mapped) {
    Vec4 r;
#if NVFP4R_HAS_CLUSTER
    asm volatile("ld.shared::cluster.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3])
                 : "r"(mapped));
#else
    r = load_shared_16(mapped);
#endif
    return r;
}
