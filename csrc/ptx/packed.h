// Two float32 in one instruction (PTX ISA: add, mul, fma of f32x2; from compute capability 10.0).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flash_cuda::ptx {

// Exponentials of the special function unit cost as much as the matrix product that they follow on
// compute capability 10.0; 10.3 has twice the units. Here and not in a kernel, because kernels do
// not ask what they are compiled for.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1030
constexpr bool kExp2IsScarce = false;
#else
constexpr bool kExp2IsScarce = true;
#endif

__device__ __forceinline__ uint64_t pair(float2 v) {
  uint64_t r;
  asm("mov.b64 %0, {%1, %2};" : "=l"(r) : "f"(v.x), "f"(v.y));
  return r;
}
__device__ __forceinline__ float2 unpair(uint64_t v) {
  float2 r;
  asm("mov.b64 {%0, %1}, %2;" : "=f"(r.x), "=f"(r.y) : "l"(v));
  return r;
}

__device__ __forceinline__ float2 add2(float2 a, float2 b) {
  uint64_t r;
  asm("add.rn.ftz.f32x2 %0, %1, %2;" : "=l"(r) : "l"(pair(a)), "l"(pair(b)));
  return unpair(r);
}
// Rounded towards minus infinity.
__device__ __forceinline__ float2 add2_down(float2 a, float2 b) {
  uint64_t r;
  asm("add.rm.ftz.f32x2 %0, %1, %2;" : "=l"(r) : "l"(pair(a)), "l"(pair(b)));
  return unpair(r);
}
__device__ __forceinline__ float2 mul2(float2 a, float2 b) {
  uint64_t r;
  asm("mul.rn.ftz.f32x2 %0, %1, %2;" : "=l"(r) : "l"(pair(a)), "l"(pair(b)));
  return unpair(r);
}
__device__ __forceinline__ float2 fma2(float2 a, float2 b, float2 c) {
  uint64_t r;
  asm("fma.rn.ftz.f32x2 %0, %1, %2, %3;" : "=l"(r) : "l"(pair(a)), "l"(pair(b)), "l"(pair(c)));
  return unpair(r);
}
// The larger one; NaN if one is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

}  // namespace flash_cuda::ptx
