// The backward kernels of this folder, one launcher for each head dimension.
#pragma once

#include "common/kernel_table.h"

namespace flash_cuda::sm100 {

// head dims of Q, K and of V up to these; smaller ones end inside the tile.
template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_bwd(const BwdParams& params, cudaStream_t stream);
template <int kHeadDim>
size_t bwd_workspace_bytes(const BwdParams& params);

// By pairs of thread blocks, head dims up to 128; the workspace is bwd_workspace_bytes<128>.
template <DType kDType>
void launch_bwd_pair(const BwdParams& params, cudaStream_t stream);

// In two passes, head dims up to 256.
template <DType kDType>
void launch_bwd_wide(const BwdParams& params, cudaStream_t stream);
size_t bwd_wide_workspace_bytes(const BwdParams& params);

// Whether a call is for the general variants.
inline bool changes_scores(const FwdParams& p) {
  return p.softcap != 0.0f || p.alibi_slopes || p.bias || !(p.softmax_scale > 0.0f);
}

// Null, or why this folder does not serve the call; the same of its pairs.
const char* refuse_bwd(const BwdParams& params);
const char* refuse_bwd_pair(const BwdParams& params);

}  // namespace flash_cuda::sm100
