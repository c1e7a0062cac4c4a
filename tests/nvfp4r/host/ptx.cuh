// kernels/ptx.cuh on the host: decode.cuh has what is needed of it.
#pragma once
#include "decode.cuh"
