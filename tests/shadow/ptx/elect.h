// Stand-in for compute capability 9.0: of the warp that allocates tensor memory, which is the one
// that issues products, every lane is elected. All of them wait, and share the work of a product.
#pragma once

#include <cstdint>

namespace flash_cuda::ptx {

constexpr int kShadowSms = 144;
__device__ volatile uint32_t shadow_issuer[kShadowSms];  // warp of the block on each SM

__device__ __forceinline__ uint32_t shadow_sm() {
  uint32_t sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  return sm;
}
__device__ __forceinline__ bool shadow_is_issuer() {
  return shadow_issuer[shadow_sm()] == threadIdx.x / 32;
}
__device__ __forceinline__ bool elect_one() { return threadIdx.x % 32 == 0 || shadow_is_issuer(); }

}  // namespace flash_cuda::ptx
