// Stands in for kernels/stages.cuh: barriers that nobody waits for, and what was asked of them.
#pragma once
#include "ptx.cuh"

struct Barrier { int arrivals, parity; };
static Barrier barriers[128];  // address / 8

static void barrier_arrive(u32 barrier) { barriers[barrier / 8].arrivals++; }
static void barrier_wait(u32 barrier, u32 parity) { barriers[barrier / 8].parity = parity; }
static void fence_for_async() {}
static void __syncwarp() {}
static bool arrives(int lane) { return lane == 0; }
void barrier_expect(u32 barrier, u32 bytes);  // of functions that are not called here
void copy_bulk(u32 target, const void* source, u32 bytes, u32 barrier);
