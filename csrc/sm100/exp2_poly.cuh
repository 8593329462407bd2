// 2^x on the FMA units, to spare the special function unit (docs/numerics.md has the study).
#pragma once

#include "common/params.h"
#include "ptx/packed.h"

namespace flash_cuda::sm100 {

// 2^f on [0, 1) as 1 + c1 f + c2 f^2 + ...: a Remez exchange of the relative error with the
// constant held at 1, so that whole powers are exact. Error 8.6e-5 (degree 3), which bfloat16
// hides; 3.0e-6 (degree 4) for float16.
template <DType kDType>
__device__ __forceinline__ float2 exp2_fraction(float2 f) {
  const auto step = [f](float2 power, float c) { return ptx::fma2(power, f, make_float2(c, c)); };
  float2 power;
  if constexpr (kDType == DType::kFloat16) {
    power = step(make_float2(0.0134266838f, 0.0134266838f), 0.0522424728f);
    power = step(step(power, 0.241280198f), 0.693044841f);
  } else {
    power = step(make_float2(0.0770670399f, 0.0770670399f), 0.227644995f);
    power = step(power, 0.695116758f);
  }
  return step(power, 1.0f);
}

// For x < 128. From -127 down the result is 0: the exponent of 1 reaches zero. Adding 1.5 * 2^23,
// rounded down, leaves floor(x) in the low bits.
template <DType kDType>
__device__ __forceinline__ float2 exp2_polynomial(float2 x) {
  constexpr float kMagic = 12582912.0f;
  x = make_float2(fmaxf(x.x, -127.0f), fmaxf(x.y, -127.0f));
  const float2 whole = ptx::add2_down(x, make_float2(kMagic, kMagic));
  const float2 floor = ptx::add2(whole, make_float2(-kMagic, -kMagic));
  const float2 f = ptx::add2(x, make_float2(-floor.x, -floor.y));
  const float2 power = exp2_fraction<kDType>(f);
  return make_float2(__int_as_float(__float_as_int(power.x) + (__float_as_int(whole.x) << 23)),
                     __int_as_float(__float_as_int(power.y) + (__float_as_int(whole.y) << 23)));
}

}  // namespace flash_cuda::sm100
