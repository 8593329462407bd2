// Stand-in for compute capability 9.0: pairs of float32 one after the other.
#pragma once

#include <cuda_runtime.h>

namespace flash_cuda::ptx {

constexpr bool kExp2IsScarce = true;

__device__ __forceinline__ float2 add2(float2 a, float2 b) {
  return make_float2(a.x + b.x, a.y + b.y);
}
__device__ __forceinline__ float2 add2_down(float2 a, float2 b) {
  return make_float2(__fadd_rd(a.x, b.x), __fadd_rd(a.y, b.y));
}
__device__ __forceinline__ float2 mul2(float2 a, float2 b) {
  return make_float2(a.x * b.x, a.y * b.y);
}
__device__ __forceinline__ float2 fma2(float2 a, float2 b, float2 c) {
  return make_float2(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y));
}
__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

}  // namespace flash_cuda::ptx
