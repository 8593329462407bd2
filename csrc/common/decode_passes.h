// The kernels that every folder with a split-KV kernel offers beside it.
#pragma once

#include <cuda_runtime.h>

#include "common/params.h"

namespace flash_cuda {

// Merges partial results into out and lse (combine.cu).
void launch_combine(const CombineParams& params, cudaStream_t stream);
// Writes new keys and values into the cache (kv_append.cu).
void launch_kv_append(const KvAppendParams& params, cudaStream_t stream);

}  // namespace flash_cuda
