// The backward kernels of this folder, one launcher for each head dimension.
#pragma once

#include "common/kernel_table.h"

namespace flash_cuda::sm100 {

// head dims of Q, K and of V up to these; smaller ones end inside the tile.
template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_bwd(const BwdParams& params, cudaStream_t stream);
template <int kHeadDim>
size_t bwd_workspace_bytes(const BwdParams& params);

// Null, or why this folder does not serve the call.
const char* refuse_bwd(const BwdParams& params);

}  // namespace flash_cuda::sm100
