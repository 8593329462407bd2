// Which rows of the forward have a gradient.
#pragma once

#include <cmath>

namespace flash_cuda {

// Not those without keys, whose lse is -inf. Nor those whose lse is so large that a float has no
// fraction left there (a row of nothing but a bias of -1e30, say): exp(score - lse) could be
// anything up to infinity, and infinity times the zero gradient of such a row is a NaN for all.
constexpr float kLargestLse = 0x1p24f;

__device__ __forceinline__ bool has_gradient(float lse) { return fabsf(lse) <= kLargestLse; }

}  // namespace flash_cuda
