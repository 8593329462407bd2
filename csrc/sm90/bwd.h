// The Hopper backward, as dispatch sees it.
#pragma once

#include "common/kernel_table.h"

namespace flash_cuda::sm90 {

template <DType kDType, int kHeadDim>
void launch_bwd(const BwdParams& params, cudaStream_t stream);
template <int kHeadDim>
size_t bwd_workspace_bytes(const BwdParams& params);
// Null where csrc/sm90 serves the call, else why not.
const char* refuse_bwd(const BwdParams& params);

}  // namespace flash_cuda::sm90
