// Grid, tile and variant of a split-KV call.
#pragma once

#include "common/launch_kernel.h"
#include "sm80/decode.h"
#include "sm80/decode_kernel.cuh"
#include "sm80/variant.h"

namespace flash_cuda::sm80 {

// Pages are served by the plain variant too: they are what decoding mostly reads.
inline bool is_plain_decode(const FwdParams& p) {
  FwdParams f = p;
  f.block_table = nullptr;
  return is_plain(f) && !p.qv;
}

template <class Tile, DType kDType, Variant kVariant>
void launch_decode_tile(const FwdParams& p, cudaStream_t stream) {
  const int group = p.pack_gqa ? p.num_heads_q / p.num_heads_kv : 1;
  const int64_t heads = p.num_heads_q / group;
  const int64_t tiles =
      p.cu_seqlens_q ? packed_blocks(p.total_q * group, p.batch, Tile::kBlockQ)
                     : p.batch * ceil_div(int64_t{p.seqlen_q} * group, int64_t{Tile::kBlockQ});
  launch_kernel(decode_kernel<Tile, kDType, kVariant>, tiles * heads * p.num_splits, Tile::kThreads,
                Tile::kSmemBytes, stream, p, group);
}

template <DType kDType, int kHeadDim, int kHeadDimV, bool kLarge>
void launch_decode_size(const FwdParams& p, cudaStream_t stream) {
  const int64_t rows = int64_t{p.seqlen_q} * (p.pack_gqa ? p.num_heads_q / p.num_heads_kv : 1);
  const auto launch = [&](auto tile) {
    using Tile = decltype(tile);
    if (is_plain_decode(p)) {
      launch_decode_tile<Tile, kDType, Variant::kPlain>(p, stream);
    } else {
      launch_decode_tile<Tile, kDType, Variant::kGeneral>(p, stream);
    }
  };
  // seqlen_q of packed rows depends on the whole batch, but with a fixed size of the parts the
  // result of a sequence must not: there packed rows always take the same tile.
  const bool same_tile = p.split_size > 0 && p.cu_seqlens_q;
  if (rows <= 16 && !same_tile) {
    launch(DecodeTile<kHeadDim, kHeadDimV, kLarge, 1>{});
  } else {
    launch(DecodeTile<kHeadDim, kHeadDimV, kLarge, 4>{});
  }
}

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_decode(const FwdParams& params, cudaStream_t stream) {
  FwdParams p = params;
  p.unaligned = is_unaligned(p) || (p.qv && is_unaligned(p.qv, p.qv_stride));
  using Large = DecodeTile<kHeadDim, kHeadDimV, true, 1>;
  using Small = DecodeTile<kHeadDim, kHeadDimV, false, 1>;
  if constexpr (Large::kSmemBytes > Small::kSmemBytes) {
    if (p.max_smem_per_block < kLargeSmem) {
      return launch_decode_size<kDType, kHeadDim, kHeadDimV, false>(p, stream);
    }
  }
  launch_decode_size<kDType, kHeadDim, kHeadDimV, true>(p, stream);
}

}  // namespace flash_cuda::sm80
