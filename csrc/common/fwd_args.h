// What the launchers of forward kernels with tensor maps add to FwdParams.
#pragma once

#include "common/fwd_work.cuh"
#include "common/tma_rows.h"

namespace flash_cuda {

struct FwdTileArgs {
  CUtensorMap q_map, k_map, v_map, out_map;
  FwdParams params;
  RowMap q_rows, kv_rows, out_rows;
  int num_tiles = 0;             // packed q: an upper bound, the device counts
  int q_blocks = 0;              // of one sequence, dense
  int section = 1;               // (batch, head) pairs whose K and V share the L2 cache, dense
  int joined_from = kUnbounded;  // pairs from here on are one section, a multiple of the others
  int held_back = 0;             // Q blocks of a pair that come behind all sections
};

// Rows of a tile, and what the copy engine moves at once.
struct FwdBoxes {
  int block_q;
  int columns, q_rows, kv_rows, out_rows;
};

inline FwdTileArgs fwd_tile_args(const FwdParams& p, const FwdBoxes& boxes) {
  FwdTileArgs args;
  args.params = p;
  const FwdSources t = FwdSources::make(p);
  args.q_rows = row_map(t.q, t.packed_q, p.seqused_q);
  args.kv_rows = row_map(t.k, t.packed_kv, p.seqused_k);
  args.out_rows = row_map(t.out, t.packed_q, false);
  args.q_map = rows_tensor_map(t.q, args.q_rows, boxes.columns, boxes.q_rows, p.dtype);
  args.k_map = rows_tensor_map(t.k, args.kv_rows, boxes.columns, boxes.kv_rows, p.dtype);
  args.v_map = rows_tensor_map(t.v, args.kv_rows, boxes.columns, boxes.kv_rows, p.dtype);
  args.out_map = rows_tensor_map(t.out, args.out_rows, boxes.columns, boxes.out_rows, p.dtype);

  args.q_blocks = ceil_div(p.seqlen_q, boxes.block_q);
  // Packed: every sequence, and the rows behind them, may end in a partial tile.
  const int64_t blocks_q =
      t.packed_q ? p.total_q / boxes.block_q + p.batch + 1 : int64_t(args.q_blocks) * p.batch;
  args.num_tiles = static_cast<int>(blocks_q * p.num_heads_q);
  args.section = heads_section(p);
  return args;
}

}  // namespace flash_cuda
