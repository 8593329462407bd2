// Conversions between fp32 and pairs of 16-bit floats (PTX ISA: cvt).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/params.h"

namespace flash_cuda::ptx {

// Two floats, rounded to nearest even, `lo` in the lower half.
template <DType kDType>
__device__ __forceinline__ uint32_t pack(float lo, float hi) {
  static_assert(kDType == DType::kFloat16 || kDType == DType::kBFloat16);
  uint32_t r;
  if constexpr (kDType == DType::kFloat16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  }
  return r;
}

template <DType kDType>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  static_assert(kDType == DType::kFloat16 || kDType == DType::kBFloat16);
  if constexpr (kDType == DType::kFloat16) {
    __half2 h;
    memcpy(&h, &pair, 4);
    return __half22float2(h);
  } else {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
}

// One 16-bit float.
template <DType kDType>
__device__ __forceinline__ float to_float(uint16_t bits) {
  return unpack<kDType>(bits).x;
}
template <DType kDType>
__device__ __forceinline__ uint16_t from_float(float x) {
  return static_cast<uint16_t>(pack<kDType>(x, 0.0f));
}

}  // namespace flash_cuda::ptx
