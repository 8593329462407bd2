// Grid, shared memory and variant of a forward call.
#pragma once

#include <algorithm>

#include "common/launch_kernel.h"
#include "sm80/fwd.h"
#include "sm80/fwd_kernel.cuh"
#include "sm80/variant.h"

namespace flash_cuda::sm80 {

inline int section_of_heads(const FwdParams& p) {
  const double bytes = 2.0 * p.seqlen_kv * (p.head_dim + p.head_dim_v);
  const int group = p.num_heads_q / std::max(p.num_heads_kv, 1);
  const int kv_heads = static_cast<int>(std::max(1.0, kSectionBytes / std::max(bytes, 1.0)));
  return static_cast<int>(std::min<int64_t>(static_cast<int64_t>(kv_heads) * group,
                                            static_cast<int64_t>(p.num_heads_q) * p.batch));
}

template <class Tile, DType kDType, Variant kVariant>
void launch_fwd_tile(const FwdParams& p, cudaStream_t stream) {
  const bool descending = p.window_right < kUnbounded || p.attention_chunk > 0;
  const DenseSchedule schedule{ceil_div(p.seqlen_q, Tile::kBlockQ), p.num_heads_q, p.batch,
                               section_of_heads(p), descending};
  const int64_t blocks = p.cu_seqlens_q
                             ? packed_blocks(p.total_q, p.batch, Tile::kBlockQ) * p.num_heads_q
                             : schedule.size();
  launch_kernel(fwd_kernel<Tile, kDType, kVariant>, blocks, Tile::kThreads, Tile::kSmemBytes,
                stream, p, schedule);
}

template <DType kDType, int kHeadDim, int kHeadDimV, Variant kVariant>
void launch_fwd_variant(const FwdParams& p, cudaStream_t stream) {
  with_smem_class(p.max_smem_per_block, [&](auto smem) {
    using Tile = FwdTile<kHeadDim, kHeadDimV, decltype(smem)::value, kVariant>;
    static_assert(Tile::kSmemBytes <= smem_bytes(decltype(smem)::value));
    launch_fwd_tile<typename Tile::Shape, kDType, kVariant>(p, stream);
  });
}

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_fwd(const FwdParams& params, cudaStream_t stream) {
  FwdParams p = params;
  p.unaligned = is_unaligned(p);
  if (is_plain(p)) {
    launch_fwd_variant<kDType, kHeadDim, kHeadDimV, Variant::kPlain>(p, stream);
  } else {
    launch_fwd_variant<kDType, kHeadDim, kHeadDimV, Variant::kGeneral>(p, stream);
  }
}

}  // namespace flash_cuda::sm80
