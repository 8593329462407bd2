// KV blocks of a head, dealt out to thread blocks that each walk several of them in ascending
// order.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace flash_cuda {

// Dealt to and fro (0 1 2 | 2 1 0 | 0 1 2), so that everybody gets long and short blocks of a
// causal mask.
struct KvDeal {
  int count = 1;  // of owners

  FLASH_CUDA_HOST_DEVICE int block(int round, int owner) const {
    return round * count + (round % 2 ? count - 1 - owner : owner);
  }
  FLASH_CUDA_HOST_DEVICE int owner(int block) const {
    const int place = block % count;
    return block / count % 2 ? count - 1 - place : place;
  }
  // The next block of the owner of `block`.
  FLASH_CUDA_HOST_DEVICE int next(int block) const {
    return this->block(block / count + 1, owner(block));
  }
  // The first block of `owner` that is not before `begin`.
  FLASH_CUDA_HOST_DEVICE int first_from(int begin, int owner) const {
    const int round = begin / count, at = block(round, owner);
    return at >= begin ? at : block(round + 1, owner);
  }
};

// How many owners the KV blocks of each of `heads` heads are dealt out to: enough to fill waves of
// `slots` thread blocks, and few, as each owner costs a copy of dq (`bytes` for all heads). 0: one
// copy would exceed `limit`.
inline int count_kv_owners(int64_t heads, int blocks, int block_kv, int slots, double bytes,
                           double limit) {
  int best = 0;
  double best_cost = 0.0;
  for (int n = 1; n <= blocks && n * bytes <= limit; ++n) {
    if (n > 1 && heads * n > int64_t{16} * slots) break;
    // In blocks of keys. To read one more copy of all heads takes as long as 32 keys of a wave.
    const double waves = static_cast<double>(ceil_div(heads * n, int64_t{slots}));
    const double cost = waves * ceil_div(blocks, n) + 32.0 / block_kv * n * heads / slots;
    if (best == 0 || cost < best_cost) best = n, best_cost = cost;
  }
  return best;
}

}  // namespace flash_cuda
