// Approximate functions of the special function unit (PTX ISA: ex2, lg2, tanh).
#pragma once

namespace flash_cuda::ptx {

// 2^x; subnormal results become zero, x = -inf gives 0. Relative error 2^-22.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x) for normal x, -inf for 0.
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flash_cuda::ptx
