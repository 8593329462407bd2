// Host side of the split-KV kernels: declarations of what decode_launch.cuh
// defines and decode_hdim*.cu instantiate.
#pragma once

#include "common/kernel_table.h"

namespace flash_cuda::sm80 {

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_decode(const FwdParams& params, cudaStream_t stream);
template <int kHeadDim, int kHeadDimV>
size_t decode_workspace_bytes(const FwdParams& params);

}  // namespace flash_cuda::sm80
