// Host side of the backward kernels: declarations of what bwd_launch.cuh defines and bwd_hdim*.cu
// instantiate.
#pragma once

#include "common/kernel_table.h"

namespace flash_cuda::sm80 {

template <int kHeadDim, int kHeadDimV>
size_t bwd_workspace_bytes(const BwdParams& params);

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_bwd(const BwdParams& params, cudaStream_t stream);

}  // namespace flash_cuda::sm80
