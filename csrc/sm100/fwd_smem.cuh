// Shared memory of the forward kernel: panels, barriers, and what roles hand to each other.
#pragma once

#include "common/fwd_work.cuh"
#include "common/mask.h"
#include "common/pipeline.cuh"
#include "ptx/fence.h"
#include "ptx/mbarrier.h"
#include "ptx/smem_addr.h"
#include "sm100/arrive.cuh"
#include "sm100/fwd_tile.h"

namespace flash_cuda::sm100 {

constexpr int kWorkSlots = 2;
// Warps that read the work slots: all but the scheduler.
template <class Tile>
constexpr int kWorkReaders = 4 * (Tile::kTilesQ + 1) + 3;

// Written by one role, read by another; barriers say when.
struct FwdExchange {
  float scale[2][128];    // of S slot and row: what O is to be multiplied with
  float inverse[2][128];  // of Q tile and row: 1 / sum at the end
  FwdWork work[kWorkSlots];
  alignas(16) uint32_t answer[4];  // of cluster launch control
  uint32_t tmem;                   // start of the allocated columns
};

// Barriers. Those of an S slot complete a phase for each block of keys that goes through the slot;
// those of a Q tile one for each tile of work (but o_full with one Q tile: each block).
enum Barrier : int {
  kQFull = 0,       // Q tile: the copy engine -> MMA
  kQEmpty = 2,      // Q tile: MMA (or the store warp, where O lies over Q) -> load
  kSFull = 4,       // slot: MMA -> softmax: S is there, and products issued before are done
  kPReady = 6,      // slot: softmax, 3/4 of P is stored; correction, O is scaled -> MMA
  kPLast = 8,       // slot: softmax, the rest of P -> MMA
  kScaleFull = 10,  // slot: softmax -> correction
  kRowEnd = 12,     // Q tile: softmax -> correction: 1 / sum
  kOFull = 14,      // Q tile: MMA -> correction
  kOutFull = 16,    // Q tile: correction -> store
  kOutEmpty = 18,   // Q tile: store -> correction
  kRowTaken = 20,   // Q tile: correction -> softmax: 1 / sum has been read
  kAnswer = 22,     // cluster launch control -> scheduler
  kNearEnd = 23,    // load -> scheduler: time to take the next tile of work
  kBarriers = 24,
};

// A ring of panels; stages are not a power of two, one thread on each side counts.
template <class Tile>
struct PanelRing {
  uint32_t panels, barriers;
  static constexpr int kBytes = 16 * Tile::kStages;

  static __device__ __forceinline__ uint32_t stage(uint32_t count) { return count % Tile::kStages; }
  static __device__ __forceinline__ uint32_t phase(uint32_t count) {
    return count / Tile::kStages % 2;
  }
  __device__ __forceinline__ uint32_t panel(uint32_t count) const {
    return panels + stage(count) * Tile::kPanelBytes;
  }
  __device__ __forceinline__ uint32_t full(uint32_t count) const {
    return barriers + 16 * stage(count);
  }
  __device__ __forceinline__ uint32_t empty(uint32_t count) const { return full(count) + 8; }
  __device__ __forceinline__ void wait_full(uint32_t count) const {
    ptx::mbarrier_wait(full(count), phase(count));
  }
  __device__ __forceinline__ void wait_empty(uint32_t count) const {
    ptx::mbarrier_wait(empty(count), phase(count) ^ 1);
  }
};

template <class Tile>
struct FwdSmem {
  uint32_t base;
  FwdExchange* exchange;

  using WorkRing = RingBarriers<kWorkSlots>;
  static constexpr int kBarriersAt = Tile::kSmemBarriers + sizeof(FwdExchange);
  static constexpr int kWorkAt = kBarriersAt + 8 * kBarriers;
  static constexpr int kRingAt = kWorkAt + WorkRing::kBytes;
  static_assert(kRingAt + PanelRing<Tile>::kBytes <= Tile::kSmemBytes);
  static_assert(sizeof(FwdExchange) % 16 == 0);

  __device__ __forceinline__ uint32_t q(int tile) const {
    return base + Tile::kSmemQ + tile * Tile::kQTileBytes;
  }
  __device__ __forceinline__ uint32_t out(int tile) const {
    return base + Tile::kSmemOut + tile * Tile::kOutStride;
  }
  __device__ __forceinline__ uint32_t barrier(Barrier which, int i = 0) const {
    return base + kBarriersAt + 8 * (which + i);
  }
  __device__ __forceinline__ WorkRing work_ring() const { return {base + kWorkAt}; }
  __device__ __forceinline__ PanelRing<Tile> ring() const {
    return {base + Tile::kSmemRing, base + kRingAt};
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(barrier(kQFull, i), 1);
      ptx::mbarrier_init(barrier(kQEmpty, i), 1);
      ptx::mbarrier_init(barrier(kSFull, i), 1);
      ptx::mbarrier_init(barrier(kPReady, i), 8);
      ptx::mbarrier_init(barrier(kPLast, i), 4);
      ptx::mbarrier_init(barrier(kScaleFull, i), 4);
      ptx::mbarrier_init(barrier(kRowEnd, i), 4);
      ptx::mbarrier_init(barrier(kRowTaken, i), 4);
      ptx::mbarrier_init(barrier(kOFull, i), 1);
      ptx::mbarrier_init(barrier(kOutFull, i), 4);
      ptx::mbarrier_init(barrier(kOutEmpty, i), 1);
    }
    ptx::mbarrier_init(barrier(kAnswer), 1);
    ptx::mbarrier_init(barrier(kNearEnd), 1);
    work_ring().init(1, kWorkReaders<Tile>);
    for (int i = 0; i < Tile::kStages; ++i) {
      ptx::mbarrier_init(ring().full(i), 1);
      ptx::mbarrier_init(ring().empty(i), 1);
    }
    ptx::fence_mbarrier_init();
  }

  // The tiles-th piece of work; called by one lane or by a whole warp.
  __device__ __forceinline__ FwdWork take_work(uint32_t tiles, bool whole_warp) const {
    work_ring().wait_full(tiles);
    const FwdWork work = exchange->work[tiles % kWorkSlots];
    if (whole_warp) __syncwarp();
    if (!whole_warp || threadIdx.x % 32 == 0) ptx::mbarrier_arrive(work_ring().empty(tiles));
    return work;
  }
};

// Block of keys number `count` since the start goes through this S slot, in this phase of the
// slot's barriers: two Q tiles have a slot each, one has both in turn.
template <class Tile>
__device__ __forceinline__ int slot_of(int tile, uint32_t count) {
  return Tile::kTilesQ == 2 ? tile : count % 2;
}
template <class Tile>
__device__ __forceinline__ uint32_t phase_of(uint32_t count) {
  return Tile::kTilesQ == 2 ? count % 2 : count / 2 % 2;
}

// Blocks of keys that a piece of work visits, the same for every role.
template <class Tile>
__device__ __forceinline__ BlockRange blocks_of(const FwdParams& p, const FwdWork& w) {
  return Mask::make(p, w.seqlen_q, w.seqlen_kv)
      .kv_blocks(w.q_block * Tile::kBlockQ, Tile::kBlockQ, Tile::kBlockKV);
}

}  // namespace flash_cuda::sm100
