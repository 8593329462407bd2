// Asynchronous copies from global to shared memory (PTX ISA: cp.async, non-bulk).
#pragma once

#include <cstdint>

namespace flash_cuda::ptx {

// Copies 16 bytes past L1; both addresses are 16-byte aligned. With `valid` false nothing is read
// and the 16 bytes become zero (`gmem` must still be a mapped address).
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* gmem, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* gmem) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem), "l"(gmem) : "memory");
}

// The same with an L2 policy (l2_evict_first).
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* gmem, bool valid,
                                            uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(smem),
               "l"(gmem), "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}
// The policy for what is read once: other lines stay in the L2.
__device__ __forceinline__ uint64_t l2_evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies 4 bytes; both addresses are 4-byte aligned.
__device__ __forceinline__ void cp_async_4(uint32_t smem, const void* gmem, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem), "l"(gmem),
               "r"(valid ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `kPending` of this thread's latest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flash_cuda::ptx
