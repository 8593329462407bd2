// What the launcher adds to FwdParams, and what the scheduler hands out.
#pragma once

#include <cuda.h>

#include "common/fwd_args.h"
#include "common/mask.h"
#include "sm90/fwd_tail.h"

namespace flash_cuda::sm90 {

struct FwdArgs : FwdTileArgs {
  int counter = 0;       // index of the tile counter of this launch
  float scale_log2 = 0;  // what the main loop multiplies scores with
  // Full calls: Q blocks from `tall_tiles` on are of a warpgroup fewer, and come last. Below a
  // diagonal the first Q block, which sees fewest keys, has `missing_rows` fewer, whole warpgroups.
  bool lowest_last = false;
  int tall_tiles = kUnbounded, missing_rows = 0;
  bool pair_heads = false;  // kPair: tiles of two query heads of a KV head, else neighbours
  CUtensorMap bias_map;
  int bias_rows = 0;  // of a box: 64; 1 where all queries share a row; 0: the map does not serve
  TailPlan tail;      // kShareTail: who has what of the last round
  Deal deal;
  int arrivals = 0;  // which of part_arrivals
};

// kShareTail: part `number` of `count` of a shared tile, of the share first_share + number. A whole
// tile is one part.
struct FwdPart {
  int tile, first_share, number, count;
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
  int kv_begin, kv_end;  // blocks that any warpgroup walks
  FwdWalk walks[kWalks];
  FwdPart part;  // kShareTail
};

}  // namespace flash_cuda::sm90
