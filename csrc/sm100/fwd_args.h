// What the launcher adds to FwdParams: tensor maps and the order of tiles.
#pragma once

#include <cuda.h>

#include "common/params.h"
#include "common/tma_rows.h"

namespace flash_cuda::sm100 {

struct FwdArgs {
  CUtensorMap q_map, k_map, v_map, out_map;
  FwdParams params;
  RowMap q_rows, kv_rows, out_rows;
  int num_tiles = 0;  // packed q: an upper bound, the device counts
  int q_blocks = 0;   // of one sequence, dense
  int section = 1;    // (batch, head) pairs whose K and V share the L2 cache, dense
};

}  // namespace flash_cuda::sm100
