// The forward kernels of this folder, one launcher for each head dimension.
#pragma once

#include <cuda_runtime.h>

#include "common/params.h"

namespace flash_cuda::sm90 {

// head dims of Q, K and of V up to these; smaller ones end inside the tile.
template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_fwd(const FwdParams& params, cudaStream_t stream);

// Device memory that it needs.
template <int kHeadDim, int kHeadDimV>
size_t fwd_workspace_bytes(const FwdParams& params);

// Null, or why this folder does not serve the call.
const char* refuse_fwd(const FwdParams& params);

}  // namespace flash_cuda::sm90
