// The Hopper backward for wide heads, as dispatch sees it.
#pragma once

#include "common/kernel_table.h"

namespace flash_cuda::sm90 {

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_bwd_wide(const BwdParams& params, cudaStream_t stream);
template <int kHeadDim, int kHeadDimV>
size_t bwd_wide_workspace_bytes(const BwdParams& params);
// Null where these kernels serve the call, else why not.
const char* refuse_bwd_wide(const BwdParams& params);

}  // namespace flash_cuda::sm90
