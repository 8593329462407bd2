// Start and end of a thread block, or of both blocks of a pair: barriers and tensor memory.
#pragma once

#include "ptx/cluster.h"
#include "ptx/smem_addr.h"
#include "ptx/tcgen05.h"

namespace flash_cuda::sm100 {

// All threads of a thread block, or of a pair, meet: what they have written, and done with tensor
// memory, comes before what they do next.
template <int kCtas>
__device__ __forceinline__ void meet() {
  ptx::tcgen05_fence_before_thread_sync();
  __syncwarp();  // the barriers want warps that are together
  if constexpr (kCtas == 1) {
    __syncthreads();
  } else {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
  ptx::tcgen05_fence_after_thread_sync();
}

// `smem` has init_barriers() and an exchange, in which the start of the columns goes.
template <int kCtas, class Smem>
__device__ __forceinline__ void begin_block(const Smem& smem, int warp, int mma_warp, int columns) {
  if (threadIdx.x == 32) smem.init_barriers();
  if (warp == mma_warp) {
    ptx::tcgen05_alloc<kCtas>(ptx::smem_addr(&smem.exchange->tmem), columns);
    ptx::tcgen05_relinquish_alloc_permit<kCtas>();
  }
  meet<kCtas>();
}
template <int kCtas, class Smem>
__device__ __forceinline__ void end_block(const Smem& smem, int warp, int mma_warp, int columns) {
  meet<kCtas>();
  if (warp == mma_warp) ptx::tcgen05_dealloc<kCtas>(smem.exchange->tmem, columns);
}

}  // namespace flash_cuda::sm100
