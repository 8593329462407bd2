// Tensor maps, order of tiles and launch of the forward kernel.
#pragma once

#include "common/launch.h"
#include "common/tma_rows.h"
#include "sm90/fwd.h"
#include "sm90/fwd_store.cuh"
#include "sm90/tile_counter.h"

namespace flash_cuda::sm90 {

// (batch, head) pairs whose K and V together stay well inside the L2 cache, whole groups.
inline int heads_section(const FwdParams& p) {
  const double kv_head = double(p.seqlen_kv) * (p.head_dim + p.head_dim_v) * 2;
  const int kv_pairs = p.batch * p.num_heads_kv;
  int section = 1;
  while (section * 2 * kv_head <= kSectionBytes && section < kv_pairs) section *= 2;
  return min_of(section, kv_pairs) * (p.num_heads_q / p.num_heads_kv);
}

template <class Tile>
FwdArgs make_args(const FwdParams& p, cudaStream_t stream) {
  FwdArgs args;
  args.params = p;
  const bool packed_q = p.cu_seqlens_q, packed_kv = p.cu_seqlens_k;
  const int64_t rows_q = packed_q ? p.total_q : p.seqlen_q;
  const int64_t rows_kv = packed_kv ? p.total_kv : p.seqlen_kv;
  const MapSource q{p.q, p.q_stride, p.head_dim, rows_q, p.num_heads_q, p.batch};
  const MapSource k{p.k, p.k_stride, p.head_dim, rows_kv, p.num_heads_kv, p.batch};
  const MapSource v{p.v, p.v_stride, p.head_dim_v, rows_kv, p.num_heads_kv, p.batch};
  const MapSource out{p.out, p.out_stride, p.head_dim_v, rows_q, p.num_heads_q, p.batch};

  FwdSchedule& s = args.schedule;
  s.q_rows = row_map(q, packed_q, p.seqused_q);
  s.kv_rows = row_map(k, packed_kv, p.seqused_k || p.leftpad_k);
  s.out_rows = row_map(out, packed_q, false);
  args.q_map = rows_tensor_map(q, s.q_rows, Tile::kPanelCols, 64, p.dtype);
  args.k_map = rows_tensor_map(k, s.kv_rows, Tile::kPanelCols, Tile::kBlockKV, p.dtype);
  args.v_map = rows_tensor_map(v, s.kv_rows, Tile::kPanelCols, Tile::kBlockKV, p.dtype);
  args.out_map = rows_tensor_map(out, s.out_rows, Tile::kPanelCols, 64, p.dtype);

  s.q_blocks = ceil_div(p.seqlen_q, Tile::kBlockQ);
  // Packed: every sequence, and the rows behind them, may end in a partial tile.
  const int64_t blocks_q =
      packed_q ? p.total_q / Tile::kBlockQ + p.batch + 1 : int64_t(s.q_blocks) * p.batch;
  s.num_tiles = static_cast<int>(blocks_q * p.num_heads_q);
  s.section = heads_section(p);
  s.counter = tile_counter_index(stream);
  return args;
}

template <class Tile, DType kDType>
void launch_tile(const FwdParams& p, cudaStream_t stream) {
  static std::atomic<uint64_t> smem_allowed{0};
  auto* kernel = fwd_kernel<Tile, kDType>;
  allow_dynamic_smem(kernel, Tile::kSmemBytes, smem_allowed);
  const FwdArgs args = make_args<Tile>(p, stream);
  if (args.schedule.num_tiles == 0) return;
  const int blocks = min_of(p.num_sms, args.schedule.num_tiles);
  launch_kernel(kernel, {dim3(blocks), Tile::kThreads, Tile::kSmemBytes}, stream, args);
}

}  // namespace flash_cuda::sm90
