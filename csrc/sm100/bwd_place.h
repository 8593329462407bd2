// Where the launchers of the backward put the gradient of the bias.
#pragma once

#include <cuda_runtime.h>

#include "common/bwd_workspace.h"
#include "common/launch.h"

namespace flash_cuda::sm100 {

// Where the gradient of the bias is added up: as it is, or in deterministic mode, where it is
// broadcast, each score by itself, for a sum in a fixed order.
inline void place_dbias(BwdParams& params, const BwdWorkspace& workspace, cudaStream_t stream) {
  const FwdParams& p = params.fwd;
  if (!(params.wanted & kWantDbias)) return;
  if (float* all = workspace.dbias) {
    check_cuda(cudaMemsetAsync(all, 0, BwdWorkspace::dbias_elements(p) * 4, stream),
               "cudaMemsetAsync");
    params.dbias = all;
    params.dbias_col_stride = 1;
    params.dbias_row_stride = p.seqlen_kv;
    params.dbias_head_stride = params.dbias_row_stride * p.seqlen_q;
    params.dbias_batch_stride = params.dbias_head_stride * p.num_heads_q;
  } else {
    zero_dbias(params, stream);
  }
  params.dbias_shared = dbias_is_shared(params);
}

}  // namespace flash_cuda::sm100
