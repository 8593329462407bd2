// A ring of shared-memory stages between a producer and its consumers.
//
// Every stage has two mbarriers: `full` (its bytes have landed) and `empty` (every consumer is done
// with it). A position walks the ring and owns the phase.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.h"

namespace flash_cuda {

template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// The barriers of one ring: kStages of `full`, then kStages of `empty`, 8 bytes each.
template <int kStages>
struct RingBarriers {
  static constexpr int kBytes = 16 * kStages;
  uint32_t smem_base;

  __device__ __forceinline__ uint32_t full(int stage) const { return smem_base + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const {
    return smem_base + 8 * (kStages + stage);
  }
  __device__ __forceinline__ void init(int full_arrivals, int empty_arrivals) const {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(full(i), full_arrivals);
      ptx::mbarrier_init(empty(i), empty_arrivals);
    }
  }
  __device__ __forceinline__ void wait_full(const RingPosition<kStages>& at) const {
    ptx::mbarrier_wait(full(at.stage), at.phase);
  }
  // Stages start empty: the first time round, the wait for the phase before succeeds at once.
  __device__ __forceinline__ void wait_empty(const RingPosition<kStages>& at) const {
    ptx::mbarrier_wait(empty(at.stage), at.phase ^ 1);
  }
};

}  // namespace flash_cuda
