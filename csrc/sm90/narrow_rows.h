// Calls whose rows would leave most of a Hopper tile empty.
#pragma once

#include "common/params.h"

namespace flash_cuda::sm90 {

// Many sequences of up to `rows` rows of up to 32 columns, without score modifications: the plain
// Ampere kernels have tiles that fit them. Fewer sequences leave SMs idle either way.
inline bool is_many_narrow(const FwdParams& p, int rows) {
  constexpr int kNarrowHeadDim = 32, kManySequences = 512;
  const bool plain = p.softmax_scale > 0.0f && p.softcap == 0.0f && !p.alibi_slopes && !p.bias &&
                     !p.sink && p.dropout_p == 0.0f;
  return plain && p.seqlen_q <= rows && p.head_dim <= kNarrowHeadDim &&
         p.head_dim_v <= kNarrowHeadDim && int64_t(p.batch) * p.num_heads_q >= kManySequences;
}

}  // namespace flash_cuda::sm90
