// Host side of the forward kernels: declarations of what fwd_launch.cuh defines and fwd_hdim*.cu
// instantiate.
#pragma once

#include "common/kernel_table.h"

namespace flash_cuda::sm80 {

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_fwd(const FwdParams& params, cudaStream_t stream);

}  // namespace flash_cuda::sm80
