// What the launcher adds to FwdParams: tensor maps and the order of tiles.
#pragma once

#include <cuda.h>

#include "common/mask.h"
#include "common/params.h"
#include "common/seqlen.h"
#include "common/tma_rows.h"

namespace flash_cuda::sm90 {

// K and V of a section of heads: well inside the L2 cache.
constexpr double kSectionBytes = 32e6;

struct FwdSchedule {
  int num_tiles = 0;  // packed q: an upper bound, the device counts
  int q_blocks = 0;   // of one sequence, dense
  int section = 1;    // (batch, head) pairs whose K and V share the L2 cache, dense
  int counter = 0;    // index of the tile counter of this launch
  RowMap q_rows, kv_rows, out_rows;
};

struct FwdArgs {
  CUtensorMap q_map, k_map, v_map, out_map;
  FwdParams params;
  FwdSchedule schedule;
};

// One unit of work, as the scheduler warp hands it to the others (32 bytes of shared memory).
struct alignas(16) FwdWork {
  int q_block, head, batch;  // q_block < 0: no more work
  int q_row0;                // of SeqInfo, and so on
  int seqlen_q, seqlen_q_slot, seqlen_kv, kv_row0;
};

}  // namespace flash_cuda::sm90
