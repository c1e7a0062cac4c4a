// Stands in for kernels/cluster.cuh: a block of a cluster whose others are not there.
#pragma once
#include "ptx.cuh"

struct Cluster {
    u32 rank = 0, size = 1;
    void sync() const {}
};
