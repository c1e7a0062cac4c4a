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

__device__ __forceinline__ float load_cluster_f32(u32 mapped) {
    float v;
#if NVFP4R_HAS_CLUSTER
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(mapped));
#else
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(mapped));
#endif
    return v;
}
