// Stand-in for compute capability 9.0: copies of a pair of thread blocks.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/cluster.h"
#include "ptx/tma.h"

namespace flash_cuda::ptx {

// Hopper's copies complete on barriers of their own block. The other block's copy completes on the
// barrier at the same place there, which nobody else uses; then it tells the leader of the bytes.
// All boxes have 64 rows of 128 bytes.
template <class Copy>
__device__ __forceinline__ void shadow_load_pair(uint32_t dst, uint32_t bar, Copy copy) {
  constexpr uint32_t kBytes = 64 * 128;
  const uint32_t own = (bar & 0xffffff) | (dst & 0xff000000);
  if (cluster_block_rank() == 0) return copy(own);
  uint64_t state;
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 %0, [%1], %2;"
               : "=l"(state)
               : "r"(own), "r"(kBytes)
               : "memory");
  copy(own);
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(own),
      "l"(state)
      : "memory");
  __threadfence();
  asm volatile("mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], %1;" ::"r"(bar),
               "r"(kBytes)
               : "memory");
}
__device__ __forceinline__ void tma_load_4d_pair(uint32_t dst, const CUtensorMap* map, uint32_t bar,
                                                 int c0, int c1, int c2, int c3, uint64_t policy) {
  shadow_load_pair(dst, bar,
                   [&](uint32_t own) { tma_load_4d(dst, map, own, c0, c1, c2, c3, policy); });
}
__device__ __forceinline__ void tma_load_5d_pair(uint32_t dst, const CUtensorMap* map, uint32_t bar,
                                                 int c0, int c1, int c2, int c3, int c4,
                                                 uint64_t policy) {
  shadow_load_pair(dst, bar,
                   [&](uint32_t own) { tma_load_5d(dst, map, own, c0, c1, c2, c3, c4, policy); });
}

}  // namespace flash_cuda::ptx
