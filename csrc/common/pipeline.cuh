// A ring of shared-memory stages between a producer and its consumers.
//
// Every stage has two mbarriers: `full` (its bytes have landed) and `empty` (every consumer is done
// with it). Both sides count the items that went through; stage and phase follow from the count,
// so that a role keeps one register for a ring.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.h"

namespace flash_cuda {

// The barriers of one ring: kStages of `full`, then kStages of `empty`, 8 bytes each.
template <int kStages>
struct RingBarriers {
  static_assert((kStages & (kStages - 1)) == 0, "stage and phase are bits of the count");
  static constexpr int kBytes = 16 * kStages;
  uint32_t smem_base;

  static __device__ __forceinline__ uint32_t stage(uint32_t count) { return count % kStages; }
  static __device__ __forceinline__ uint32_t phase(uint32_t count) { return count / kStages % 2; }

  __device__ __forceinline__ uint32_t full(uint32_t count) const {
    return smem_base + 8 * stage(count);
  }
  __device__ __forceinline__ uint32_t empty(uint32_t count) const {
    return smem_base + 8 * (kStages + stage(count));
  }
  __device__ __forceinline__ void init(int full_arrivals, int empty_arrivals) const {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(full(i), full_arrivals);
      ptx::mbarrier_init(empty(i), empty_arrivals);
    }
  }
  __device__ __forceinline__ void wait_full(uint32_t count) const {
    ptx::mbarrier_wait(full(count), phase(count));
  }
  // Whether a wait for it would pass at once.
  __device__ __forceinline__ bool is_full(uint32_t count) const {
    return ptx::mbarrier_test(full(count), phase(count));
  }
  // Stages start empty: the first time round, the wait for the phase before succeeds at once.
  __device__ __forceinline__ void wait_empty(uint32_t count) const {
    ptx::mbarrier_wait(empty(count), phase(count) ^ 1);
  }
};

}  // namespace flash_cuda
