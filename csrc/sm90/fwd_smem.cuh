// Shared memory of the forward kernel: where everything lies, and its barriers.
#pragma once

#include "common/pipeline.cuh"
#include "ptx/fence.h"
#include "ptx/mbarrier.h"
#include "sm90/fwd_args.h"
#include "sm90/fwd_tile.h"

namespace flash_cuda::sm90 {

constexpr int kWorkSlots = 2;
// The producer's warps: 0 loads, 1 draws tiles, the others store, where Tile::kStoresApart, or 2
// loads Q, where Tile::kLoadsQApart.
constexpr int kFirstStoreWarp = 2, kQWarp = 2;

template <class Tile>
using FwdSlot = FwdWorkSlot<Tile::has(kTrimBlocks) ? Tile::kWarpgroups : 1>;

// Addresses of everything in shared memory.
template <class Tile>
struct FwdSmem {
  uint32_t base;

  __device__ __forceinline__ uint32_t q(int warpgroup) const {
    return base + Tile::kSmemQ + warpgroup * Tile::kQSliceBytes;
  }
  __device__ __forceinline__ uint32_t out(int warpgroup) const {
    return base + Tile::kSmemOut + warpgroup * Tile::kOutSliceBytes;
  }
  // The stage of the count-th block.
  __device__ __forceinline__ uint32_t k(uint32_t count) const {
    return base + Tile::kSmemK + count % Tile::kStages * Tile::kStageBytesK;
  }
  __device__ __forceinline__ uint32_t v(uint32_t count) const {
    return base + Tile::kSmemV + count % Tile::kStages * Tile::kStageBytesV;
  }

  __device__ __forceinline__ uint32_t bias(uint32_t count, int warpgroup) const {
    return base + Tile::kSmemBias +
           (count % Tile::kBiasStages * Tile::kWarpgroups + warpgroup) * Tile::kBiasSliceBytes;
  }

  using Ring = RingBarriers<Tile::kStages>;
  using BiasRing = RingBarriers<Tile::kBiasStages>;
  using WorkRing = RingBarriers<kWorkSlots>;
  using QRing = RingBarriers<1>;
  static constexpr int kKAt = Tile::kSmemBarriers;
  // Where Tile::kLooksAhead, what has the same turn has the same barriers.
  static constexpr int kVAt = Tile::kLooksAhead ? kKAt : kKAt + Ring::kBytes;
  static constexpr int kWorkBarriersAt = kVAt + Ring::kBytes;
  static constexpr int kQAt = kWorkBarriersAt + WorkRing::kBytes;
  static constexpr int kDrawAt = kQAt + QRing::kBytes * Tile::kWarpgroups;
  static constexpr int kBiasAt = kDrawAt + 8;
  static constexpr int kOutAt = kBiasAt + BiasRing::kBytes;
  static constexpr int kJoinsAt = kOutAt + QRing::kBytes * Tile::kWarpgroups;
  static constexpr int kMailAt = (kJoinsAt + 4 * Tile::kWarpgroups + 7) / 8 * 8;
  static constexpr int kSlotsAt = (kMailAt + 24 + 15) / 16 * 16;
  static_assert(kSlotsAt + kWorkSlots * sizeof(FwdSlot<Tile>) <=
                Tile::kSmemBarriers + Tile::kBarrierBytes);

  __device__ __forceinline__ Ring k_ring() const { return {base + kKAt}; }
  __device__ __forceinline__ Ring v_ring() const { return {base + kVAt}; }
  // In step with the K ring.
  __device__ __forceinline__ BiasRing bias_ring() const { return {base + kBiasAt}; }
  __device__ __forceinline__ WorkRing work_ring() const { return {base + kWorkBarriersAt}; }
  __device__ __forceinline__ QRing q_ring(int warpgroup) const {
    return {base + kQAt + QRing::kBytes * warpgroup};
  }
  // A phase for every part of O that a warpgroup has staged, where Tile::kStoresApart.
  __device__ __forceinline__ QRing out_ring(int warpgroup) const {
    return {base + kOutAt + QRing::kBytes * warpgroup};
  }
  __device__ __forceinline__ FwdSlot<Tile>& slot(uint32_t count) const {
    return *ptx::shared_pointer<FwdSlot<Tile>>(base + kSlotsAt +
                                               count % kWorkSlots * sizeof(FwdSlot<Tile>));
  }
  // kShareTail: whether a warpgroup has left the last part of its tile.
  __device__ __forceinline__ uint32_t joins(int warpgroup) const {
    return base + kJoinsAt + 4 * warpgroup;
  }
  // A phase a tile, completed shortly before its copies end.
  __device__ __forceinline__ uint32_t draw_barrier() const { return base + kDrawAt; }
  // Of a pair: where the second block learns what the first one drew.
  __device__ __forceinline__ uint32_t mail_full() const { return base + kMailAt; }
  __device__ __forceinline__ uint32_t mail_empty() const { return base + kMailAt + 8; }
  __device__ __forceinline__ uint32_t mail() const { return base + kMailAt + 16; }
};

template <class Tile>
__device__ __forceinline__ void init_barriers(const FwdSmem<Tile>& smem) {
  // K, or a turn, is released by every warp after its own check of the sums, V by every warpgroup;
  // of a pair, at the block that copies it.
  smem.k_ring().init(1, 4 * Tile::kWarpgroups * Tile::kCluster);
  if (!Tile::kLooksAhead) smem.v_ring().init(1, Tile::kWarpgroups * Tile::kCluster);
  if (Tile::has(kPair)) {
    ptx::mbarrier_init(smem.mail_full(), 1);
    ptx::mbarrier_init(smem.mail_empty(), 1);
  }
  const int readers = Tile::kStoresApart ? Tile::kWarpgroups : Tile::kLoadsQApart ? 1 : 0;
  smem.work_ring().init(1, 4 * Tile::kWarpgroups + 1 + readers);
  for (int w = 0; w < Tile::kWarpgroups; ++w) {
    smem.q_ring(w).init(1, 4);
    smem.out_ring(w).init(4, 1);
  }
  ptx::mbarrier_init(smem.draw_barrier(), 1);
  if (Tile::has(kGeneral)) smem.bias_ring().init(1, 4 * Tile::kWarpgroups);
  ptx::fence_mbarrier_init();
}

}  // namespace flash_cuda::sm90
