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

// The KV blocks of a tile, as a warpgroup walks them: from end - 1 down to begin. Exact softmax
// down to exact_begin, and left of full_begin.
struct alignas(16) FwdWalk {
  int begin, end, full_begin, full_end, exact_begin;
  int skip_right, skip_left;  // blocks beside them that only other warpgroups need
  FLASH_CUDA_HOST_DEVICE bool is_empty() const { return end <= begin; }
  FLASH_CUDA_HOST_DEVICE bool is_masked(int block) const {
    return block < full_begin || block >= full_end;
  }
};

// kWalks: one for all warpgroups, or one for each.
template <int kWalks_>
struct FwdWorkSlot {
  static constexpr int kWalks = kWalks_;
  FwdWork work;
  FwdWalk walks[kWalks];
};

}  // namespace flash_cuda::sm90
