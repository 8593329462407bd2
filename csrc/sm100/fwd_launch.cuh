// Tensor maps, order of tiles and launch of the forward kernel; which tile serves which call.
#pragma once

#include "common/fwd_work.cuh"
#include "common/launch.h"
#include "common/tma_rows.h"
#include "ptx/packed.h"
#include "sm100/fwd.h"
#include "sm100/fwd_kernel.cuh"

namespace flash_cuda::sm100 {

// The share of polynomial exponentials balances the special function unit against issue slots
// (docs/kernels/sm100_fwd.md); 10.3 has exponentials to spare.
template <int kHeadDim, int kHeadDimV>
struct FwdTiles;
template <>
struct FwdTiles<64, 64> {
  static constexpr int kStages = 10, kEmulated = 48;
};
template <>
struct FwdTiles<96, 96> {
  static constexpr int kStages = 6, kEmulated = 32;
};
template <>
struct FwdTiles<128, 128> {
  static constexpr int kStages = 6, kEmulated = 24;
};
template <>
struct FwdTiles<192, 128> {
  static constexpr int kStages = 8, kEmulated = 16;
};
template <>
struct FwdTiles<256, 256> {
  static constexpr int kStages = 10, kEmulated = 0;
};

template <class Tile>
FwdArgs make_args(const FwdParams& p) {
  FwdArgs args;
  args.params = p;
  const bool packed_q = p.cu_seqlens_q, packed_kv = p.cu_seqlens_k;
  const int64_t rows_q = packed_q ? p.total_q : p.seqlen_q;
  const int64_t rows_kv = packed_kv ? p.total_kv : p.seqlen_kv;
  const MapSource q{p.q, p.q_stride, p.head_dim, rows_q, p.num_heads_q, p.batch};
  const MapSource k{p.k, p.k_stride, p.head_dim, rows_kv, p.num_heads_kv, p.batch};
  const MapSource v{p.v, p.v_stride, p.head_dim_v, rows_kv, p.num_heads_kv, p.batch};
  const MapSource out{p.out, p.out_stride, p.head_dim_v, rows_q, p.num_heads_q, p.batch};
  args.q_rows = row_map(q, packed_q, p.seqused_q);
  args.kv_rows = row_map(k, packed_kv, p.seqused_k);
  args.out_rows = row_map(out, packed_q, false);
  args.q_map = rows_tensor_map(q, args.q_rows, Tile::kPanelCols, 128, p.dtype);
  args.k_map = rows_tensor_map(k, args.kv_rows, Tile::kPanelCols, Tile::kBlockKV, p.dtype);
  args.v_map = rows_tensor_map(v, args.kv_rows, Tile::kPanelCols, Tile::kBlockKV, p.dtype);
  args.out_map = rows_tensor_map(out, args.out_rows, Tile::kPanelCols, 128, p.dtype);

  args.q_blocks = ceil_div(p.seqlen_q, Tile::kBlockQ);
  // Packed: every sequence, and the rows behind them, may end in a partial tile.
  const int64_t blocks_q =
      packed_q ? p.total_q / Tile::kBlockQ + p.batch + 1 : int64_t(args.q_blocks) * p.batch;
  args.num_tiles = static_cast<int>(blocks_q * p.num_heads_q);
  args.section = heads_section(p);
  return args;
}

// One block a tile; those that run take over from those that wait.
template <class Tile, DType kDType>
void launch_tile(const FwdParams& p, cudaStream_t stream) {
  static std::atomic<uint64_t> smem_allowed{0};
  auto* kernel = fwd_kernel<Tile, kDType>;
  allow_dynamic_smem(kernel, Tile::kSmemBytes, smem_allowed);
  const FwdArgs args = make_args<Tile>(p);
  if (args.num_tiles == 0) return;
  launch_kernel(kernel, {dim3(args.num_tiles), Tile::kThreads, Tile::kSmemBytes}, stream, args);
}

inline bool is_general(const FwdParams& p) {
  return p.softcap != 0.0f || p.alibi_slopes || p.bias || p.strict || !(p.softmax_scale > 0.0f);
}

template <DType kDType, int kHeadDim, int kHeadDimV>
void launch_fwd(const FwdParams& p, cudaStream_t stream) {
  using Sizes = FwdTiles<kHeadDim, kHeadDimV>;
  if (is_general(p)) {
    launch_tile<FwdTile<kHeadDim, kHeadDimV, Sizes::kStages, 0, true>, kDType>(p, stream);
  } else {
    launch_tile<FwdTile<kHeadDim, kHeadDimV, Sizes::kStages, Sizes::kEmulated>, kDType>(p, stream);
  }
}

}  // namespace flash_cuda::sm100
