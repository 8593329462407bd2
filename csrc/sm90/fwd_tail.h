// The tiles of the last round over the device, where they are fewer than the SMs: cut into equal
// shares of KV blocks, one a block of the grid (fwd_tail.cuh).
#pragma once

#include "common/deal.h"
#include "common/host_device.h"
#include "common/params.h"

namespace flash_cuda::sm90 {

// Warpgroups of all shared tiles at most.
constexpr int kMostShared = 544;

// Tiles from `from` on, of `blocks` KV blocks each, go to `shares` blocks of the grid; none if that
// is 0.
struct TailPlan {
  int from, blocks, shares;

  // Parts go through the workspace and are joined, which takes the time of some 500 keys.
  static constexpr int kSavedKeys = 900;  // at least, of each SM's
  static constexpr int kShareBlocks = 4;  // at least

  template <class Tile>
  static TailPlan make(const FwdParams& p) {
    const int64_t tiles = int64_t{ceil_div(p.seqlen_q, Tile::kBlockQ)} * p.batch * p.num_heads_q;
    const int blocks = ceil_div(p.seqlen_kv, Tile::kBlockKV);
    const int tail = static_cast<int>(tiles % max_of(p.num_sms, 1));
    const int64_t saved = int64_t{p.num_sms - tail} * p.seqlen_kv;
    if (tail == 0 || tail * Tile::kWarpgroups > kMostShared ||
        saved < int64_t{kSavedKeys} * p.num_sms ||
        int64_t{tail} * blocks < int64_t{kShareBlocks} * p.num_sms) {
      return {0, 0, 0};
    }
    return {static_cast<int>(tiles - tail), blocks, p.num_sms};
  }
  // Of a share: what it has of a tile that an earlier one began, and of one that it leaves to later
  // ones.
  template <class Tile>
  size_t bytes() const {
    return size_t{2} * shares * Tile::kPartVectors * 16;
  }
};

}  // namespace flash_cuda::sm90
