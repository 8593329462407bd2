// The 32-bit address of a shared-memory object, as the instructions of this folder want it, and
// plain accesses through it (PTX ISA: ld.shared, st.shared).
#pragma once

#include <cstdint>

namespace flash_cuda::ptx {

__device__ __forceinline__ uint32_t smem_addr(const void* ptr) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(ptr));
}

__device__ __forceinline__ void store_shared_4(uint32_t smem, uint32_t v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared_16(uint32_t smem, const uint32_t (&v)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(v[0]), "r"(v[1]),
               "r"(v[2]), "r"(v[3])
               : "memory");
}
__device__ __forceinline__ void load_shared_16(uint32_t (&v)[4], uint32_t smem) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(smem)
               : "memory");
}
__device__ __forceinline__ uint32_t load_shared_4(uint32_t smem) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(smem) : "memory");
  return v;
}
__device__ __forceinline__ float load_shared_f32(uint32_t smem) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(smem) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_f32x2(uint32_t smem, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(smem), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ float2 load_shared_f32x2(uint32_t smem) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(smem) : "memory");
  return v;
}

}  // namespace flash_cuda::ptx
