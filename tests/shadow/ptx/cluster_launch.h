// Stand-in for compute capability 9.0: no other block is ever taken over.
#pragma once

#include <cstdint>

namespace flash_cuda::ptx {

__device__ __forceinline__ void cluster_launch_try_cancel(uint32_t, uint32_t bar) {
  asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 16;" ::"r"(bar) : "memory");
}
__device__ __forceinline__ int cluster_launch_answer(uint32_t) { return -1; }

}  // namespace flash_cuda::ptx
