// Markers and small arithmetic for functions that run on both sides.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FLASH_CUDA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASH_CUDA_HOST_DEVICE inline
#endif

namespace flash_cuda {

template <class T>
FLASH_CUDA_HOST_DEVICE constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}
template <class T>
FLASH_CUDA_HOST_DEVICE constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}
template <class T>
FLASH_CUDA_HOST_DEVICE constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}
// Rounds towards minus infinity, unlike `/`; b > 0.
FLASH_CUDA_HOST_DEVICE constexpr int floor_div(int a, int b) { return a / b - (a % b < 0 ? 1 : 0); }

}  // namespace flash_cuda
