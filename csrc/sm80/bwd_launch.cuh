// The passes of a backward call: statistics and zeros, main loop, conversion of dq.
#pragma once

#include <algorithm>

#include "common/bwd_postprocess.cuh"
#include "common/launch_kernel.h"
#include "sm80/bwd.h"
#include "sm80/bwd_kernel.cuh"
#include "sm80/variant.h"

namespace flash_cuda::sm80 {

// Calls `body` with the tile of this call.
template <int kHeadDim, int kHeadDimV, class Body>
void with_bwd_tile(const BwdParams& p, Body body) {
  const auto by_smem = [&](auto variant) {
    with_smem_class(p.fwd.max_smem_per_block, [&](auto smem) {
      using Tile = BwdTile<kHeadDim, kHeadDimV, decltype(smem)::value, decltype(variant)::value>;
      static_assert(Tile::kSmemBytes <= smem_bytes(decltype(smem)::value));
      body(typename Tile::Shape{}, variant);
    });
  };
  if (is_plain(p)) {
    by_smem(std::integral_constant<Variant, Variant::kPlain>{});
  } else {
    by_smem(std::integral_constant<Variant, Variant::kGeneral>{});
  }
}

template <int kHeadDim, int kHeadDimV>
size_t bwd_workspace_bytes(const BwdParams& p) {
  size_t bytes = 0;
  with_bwd_tile<kHeadDim, kHeadDimV>(p, [&](auto tile, auto) {
    using Tile = decltype(tile);
    BwdWorkspace ws = BwdWorkspace::shape(p, Tile::kBlockQ, kHeadDim, /*turns=*/1);
    ws.choose_copies(p, Tile::kBlockKV, Tile::kMinBlocks * p.fwd.num_sms);
    bytes = ws.place(p, nullptr);
  });
  return bytes;
}

// Queries and gradients of heads that are walked together should stay in L2. In deterministic mode
// the KV blocks of a head begin one after the other: with more heads fewer of them wait at a time,
// which counts most where they soon end, at a diagonal.
inline int section_of_kv_heads(const BwdParams& params) {
  const FwdParams& p = params.fwd;
  const int group = p.num_heads_q / std::max(p.num_heads_kv, 1);
  const double bytes = 4.0 * p.seqlen_q * (p.head_dim + p.head_dim_v) * group;
  const double heads =
      std::max(params.deterministic ? (p.window_right < p.seqlen_kv ? 32.0 : 16.0) : 1.0,
               kSectionBytes / std::max(bytes, 1.0));
  return static_cast<int>(std::min<double>(heads, std::max(p.num_heads_kv * p.batch, 1)));
}

template <class Tile, DType kDType, Variant kVariant>
void launch_bwd_tile(const BwdParams& params, cudaStream_t stream) {
  BwdParams p = params;
  p.fwd.unaligned = is_unaligned(p);
  const FwdParams& f = p.fwd;
  BwdWorkspace ws = BwdWorkspace::shape(p, Tile::kBlockQ, Tile::kHeadDim, /*turns=*/1);
  ws.choose_copies(p, Tile::kBlockKV, Tile::kMinBlocks * f.num_sms);
  ws.place(p, static_cast<char*>(p.workspace));
  if (ws.dbias) {
    check_cuda(cudaMemsetAsync(ws.dbias, 0, BwdWorkspace::dbias_elements(f) * 4, stream),
               "cudaMemsetAsync");
    p.dbias = ws.dbias;
    p.dbias_row_stride = f.seqlen_kv;
    p.dbias_head_stride = p.dbias_row_stride * f.seqlen_q;
    p.dbias_batch_stride = p.dbias_head_stride * f.num_heads_q;
    p.dbias_col_stride = 1;
  } else if (p.wanted & kWantDbias) {
    zero_dbias(p, stream);
  }
  if (p.wanted & kWantDbias) p.dbias_shared = dbias_is_shared(p);
  launch_bwd_preprocess(p, ws, stream);
  if (p.wanted & kWantDsink) launch_bwd_sink(p, ws, stream);

  // Ascending, as the deterministic order of dq wants it (and longest first under a causal mask).
  const DenseSchedule schedule{ws.copies > 0 ? ws.copies : ceil_div(f.seqlen_kv, Tile::kBlockKV),
                               f.num_heads_kv, f.batch, section_of_kv_heads(p), false};
  const int64_t blocks = f.cu_seqlens_k
                             ? packed_blocks(f.total_kv, f.batch, Tile::kBlockKV) * f.num_heads_kv
                             : schedule.size();
  auto kernel = bwd_kernel<Tile, kDType, true, kVariant>;
  if constexpr (has_dq_copies(Tile::kBlockKV)) {
    if (!ws.turn) kernel = bwd_kernel<Tile, kDType, false, kVariant>;
  }
  launch_kernel(kernel, blocks, Tile::kThreads, Tile::kSmemBytes, stream, p, ws, schedule);
  if (p.wanted & kWantDq) {
    launch_kernel(bwd_postprocess_kernel<kDType>, ws.tiles * f.num_heads_q, kPostprocessThreads, 0,
                  stream, p, ws);
  }
  if (ws.dbias) launch_bwd_dbias(params, ws, stream);
}

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_bwd(const BwdParams& p, cudaStream_t stream) {
  with_bwd_tile<kHeadDim, kHeadDimV>(p, [&](auto tile, auto variant) {
    launch_bwd_tile<decltype(tile), kDType, decltype(variant)::value>(p, stream);
  });
}

}  // namespace flash_cuda::sm80
