// Warpgroup matrix multiply (PTX ISA, "Asynchronous warpgroup level matrix instructions").
//
// Order of a group: wgmma_fence, wgmma..., wgmma_commit_group, ..., wgmma_wait_group. From the
// first wgmma to the wait, its accumulators and A registers belong to the hardware; pin() on both
// sides keeps the compiler from moving them across.
#pragma once

#include <cstdint>

#include "ptx/wgmma_gen.h"

namespace flash_cuda::ptx {

// Needed before the first wgmma and whenever other code wrote accumulators or A registers since.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// At most kPending of the newest groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void pin(float (&r)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int kRegisters>
__device__ __forceinline__ void pin(uint32_t (&r)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// Some value, without an instruction: for what is used only where it was set.
__device__ __forceinline__ void leave_unset(float& x) { asm("" : "=f"(x)); }

// Swizzle codes of the shared-memory matrix descriptor (the tensor map's enum runs the other way).
constexpr uint32_t kDescSwizzle128 = 1, kDescSwizzle64 = 2, kDescSwizzle32 = 3;

// The constant part of a descriptor; offsets in bytes.
__host__ __device__ constexpr uint64_t wgmma_desc_base(uint32_t leading, uint32_t stride,
                                                       uint32_t swizzle) {
  return (uint64_t(leading >> 4) << 16) | (uint64_t(stride >> 4) << 32) | (uint64_t(swizzle) << 62);
}
__device__ __forceinline__ uint64_t wgmma_desc(uint32_t addr, uint64_t base) {
  return base | ((addr & 0x3FFFF) >> 4);
}

}  // namespace flash_cuda::ptx
