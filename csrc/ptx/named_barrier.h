// Named barriers (PTX ISA, "barrier{.cta}"). Number 0 is __syncthreads().
#pragma once

namespace flash_cuda::ptx {

// Counts this thread and waits until `threads` (waiting and arriving ones) have come.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace flash_cuda::ptx
