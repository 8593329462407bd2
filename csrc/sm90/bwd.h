// The Hopper backward, as dispatch sees it.
#pragma once

#include "common/kernel_table.h"

namespace flash_cuda::sm90 {

template <DType kDType, int kHeadDim>
void launch_bwd(const BwdParams& params, cudaStream_t stream);
template <int kHeadDim>
size_t bwd_workspace_bytes(const BwdParams& params);
// Whether a narrow call goes to the kernel that has room for a tile of bias: with a bias that the
// copy engine can read, or with both softcap and ALiBi.
bool bwd_has_bias_tile(const BwdParams& params);
// Whether tiles of dS are written for all scores of the call, so that what they are written to need
// not be zero before.
bool bwd_tiles_all_scores(const BwdParams& params);
// Null where csrc/sm90 serves the call, else why not.
const char* refuse_bwd(const BwdParams& params);
const char* refuse_bwd_hdim96(const BwdParams& params);

}  // namespace flash_cuda::sm90
