// Which tile counter a launch may use.
#pragma once

#include <cuda_runtime.h>

namespace flash_cuda::sm90 {

constexpr int kTileCounters = 16384;  // of each kernel file
constexpr int kStreamCounters = 1024;

// Launches on one stream share a counter: none draws before the one before it has ended. A launch
// that is being captured gets the next of the others, since a graph may run beside any stream.
int tile_counter_index(cudaStream_t stream);

}  // namespace flash_cuda::sm90
